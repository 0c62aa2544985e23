#pragma once

#include <cstdint>

#include "core/resharding/plan.h"

namespace xmesh::runtime {

inline constexpr int32_t kNumTracks = 8;

/// Messages of one track between two ranks keep their order; tracks overtake one another. Track 0 takes what its sender has from the start, and
/// what goes into a reduction. What a rank passes on has its track by the slice, since slices mostly come from different ranks: the late one of two
/// streams that share a NIC does not hold up the other at every further hop. Both ends of a message find the same.
int32_t trackOf(const core::ReshardingPlan& plan, const core::Message& message);

}  // namespace xmesh::runtime
