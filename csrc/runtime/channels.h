#pragma once

#include <cstdint>

#include "core/resharding/plan.h"
#include "transport/host_transport.h"

namespace xmesh::runtime {

inline constexpr int32_t kNumChannels = 1 << transport::kChannelBits;

/// Messages of one channel between two ranks keep their order; channels overtake one another. Channel 0 takes what its sender has from the start, and
/// what goes into a reduction. What a rank passes on has its channel by the slice, since slices mostly come from different ranks: the late one of two
/// streams that share a NIC does not hold up the other at every further hop. Both ends of a message find the same.
int32_t channelOf(const core::ReshardingPlan& plan, const core::Message& message);

}  // namespace xmesh::runtime
