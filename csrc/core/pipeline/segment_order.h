#pragma once

#include <cstdint>
#include <string>

#include "core/pipeline/generators.h"
#include "core/pipeline/simulate.h"

namespace xmesh::core {

/// What a place has under way at once when it orders its segments.
struct SegmentRule {
  int32_t most_open = 2;        ///< actions of stages, F and B, that have begun and not ended, and the next ones; 1: one after the other
  bool is_split = true;         ///< each B is I, and W in waits
  bool backward_first = false;  ///< of those that are ready
};

struct SegmentOrder {
  Schedule schedule;
  double seconds = 0;  ///< that a step takes
};

/// An order of segments from one of stages: each place runs what is ready of the next `most_open` actions of its list, segment by segment, so that
/// one microbatch computes while values of another are on their way among the place's devices. List scheduling (Graham, 1966), the list's order as
/// priority; W, oldest first, where a place would wait otherwise, or where a stage holds `most_open` - 1 microbatches more than in `stages`.
/// `stages`: with B. `costs`: of segments.
SegmentOrder orderSegments(const Schedule& stages, const Segments& segments, const SegmentRule& rule, const ScheduleCosts& costs);

/// Microbatches in pairs through the segments of each stage, which take the two in turn (HiDup's Duplex; S. Zhang et al., SoCC 2022), and pairs
/// through the stages as in 1f1b. Of an odd number of microbatches the last one goes alone. `shape`: of stages.
Schedule duplex(const PipelineShape& shape, const Segments& segments);
/// The same of whole stages: both of a pair, one after the other.
Schedule inPairs(const PipelineShape& shape);

}  // namespace xmesh::core
