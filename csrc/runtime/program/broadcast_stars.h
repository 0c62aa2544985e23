#pragma once

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "core/resharding/plan.h"

namespace xmesh::runtime {

/// A plan for transports that broadcast. Where receivers pass a value on, it comes to all of them from its root instead, and the messages of one
/// range are neighbors: together they are one broadcast among the root and its receivers, a circle. Ranges with one receiver stay messages.
struct BroadcastStars {
  core::ReshardingPlan plan;
  std::vector<std::vector<int64_t>> circles;                                          ///< ascending global ranks, in the order of first use
  std::map<std::tuple<int64_t, int64_t, int64_t, int32_t, int32_t>, int32_t> circle;  ///< by task, begin, end, root and receiver of a star's message
};

/// The stars of a plan, in its order: each where its first message was, cut to `max_message_bytes`. All that the root sends it has by then, so that
/// what is valid stays so. The same on every rank.
BroadcastStars starsOf(const core::ReshardingPlan& plan, int64_t max_message_bytes);

}  // namespace xmesh::runtime
