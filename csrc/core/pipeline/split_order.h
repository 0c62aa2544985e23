#pragma once

#include <string>
#include <vector>

#include "core/pipeline/generators.h"
#include "core/pipeline/simulate.h"

namespace xmesh::core {

/// How far a place with split backwards goes ahead.
struct SplitRule {
  std::vector<int32_t> most_before_gradient;  ///< by stage, positive: microbatches between F and the end of I
  std::vector<int32_t> most_in_flight;        ///< by stage, positive: microbatches between F and the end of W
};

/// Equal stages whose F, I and W take one unit each; transfers between neighbors take `transfer` units.
ScheduleCosts unitCosts(const PipelineShape& shape, double transfer);

/// Every action of the shape's places, whose order means nothing yet: F with I and W, or with B.
Schedule allActions(const PipelineShape& shape, bool is_split = true);
/// What was done when `all` was played, as the order to do it in.
Schedule asPlayed(const std::string& name, const Schedule& all, const SimulatedSchedule& played);

/// List scheduling (Graham, 1966) with the priorities of zero bubble pipelines (Qi et al., 2023, section 3): each place runs an I as soon as there is
/// one, else the latest stage's F within the rule, else the oldest W. Takes any places and edges.
Schedule splitAsReady(const std::string& name, const PipelineShape& shape, const SplitRule& rule, const ScheduleCosts& costs);

/// The schedule with every B split: I in its place, W where the place would wait otherwise, or where its stage holds `most_in_flight` microbatches
/// and the next action is an F of it. W that are left come last.
Schedule splitInWaits(const std::string& name, const Schedule& whole, const std::vector<int32_t>& most_in_flight, const ScheduleCosts& costs);

}  // namespace xmesh::core
