#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/resharding/host_sets.h"
#include "core/resharding/plan.h"

namespace xmesh::core {

/// Elements [begin, end) of a task's box.
struct SliceRange {
  int32_t task = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

/// Ranges that go from the same hosts to the same hosts.
struct SliceClass {
  std::span<const int32_t> sources{};
  std::span<const int32_t> receivers{};
  size_t first_range = 0;
  size_t num_ranges = 0;
  int64_t num_bytes = 0;
};

/// A Partial class on its way to one reducing host.
struct PartialClass {
  SliceClass slices;  ///< sources: the reducing host; receivers: the others
  int64_t holders = 0;
};

/// A plan's slices grouped by the hosts between which they move; classes in order of their first slice.
struct SliceClasses {
  std::vector<SliceClass> classes;
  std::vector<PartialClass> partial_classes;
  std::vector<SliceRange> ranges;

  std::span<const SliceRange> rangesOf(const SliceClass& slices) const { return std::span(ranges).subspan(slices.first_range, slices.num_ranges); }
};

/// Groups the slices of a plan that has its lower bound. A Partial slice that no needing host can reduce alone is striped over needing hosts, all
/// of them or so many that a stripe is not much below one of `num_chunks` chunks of the bound; classes then take turns. Host sets are kept in
/// `host_sets`.
SliceClasses sliceClassesOf(const ReshardingPlan& plan, const HostSets& hosts, int64_t num_chunks, HostSetTable& host_sets);

}  // namespace xmesh::core
