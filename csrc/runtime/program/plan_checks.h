#pragma once

#include <cstdint>
#include <string>

#include "core/resharding/plan.h"

namespace xmesh::runtime {

inline constexpr int64_t kEveryRank = -1;
/// Whether the rank, or any rank, sends or receives the message.
inline bool involves(const core::Message& message, int64_t global_rank) {
  return global_rank == kEveryRank || message.src_rank == global_rank || message.dst_rank == global_rank;
}

/// Throws InvalidArgument unless the message names a task, a part of its elements and two ranks.
void checkMessage(const core::ReshardingPlan& plan, const core::Message& message);

/// The contribution of a slice that `global_rank` holds, or -1.
int64_t contributionOf(const core::Holders& holders, int64_t global_rank);

/// "task 3 (tensor 0, [0:4, 2:8])"
std::string taskStr(const core::ReshardingPlan& plan, int64_t task);

}  // namespace xmesh::runtime
