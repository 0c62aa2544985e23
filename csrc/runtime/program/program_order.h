#pragma once

#include <cstdint>
#include <vector>

#include "core/resharding/plan.h"

namespace xmesh::runtime {

/// The messages that `global_rank` (or, with kEveryRank, any rank) sends or receives, in the order of execution: the plan's, cut to
/// `max_message_bytes`, with all contributions of one (task, receiver) moved up to the first of them and laid out range by range, in contribution
/// order inside a range. Where partial sums are sent on, the whole tree of each range comes together instead, moved up to its first message (see
/// ReductionTree). Where no message waits for another but some are cut, all pairs of ranks come along together, so that a receiver with little memory
/// hears all its senders.
/// All ranks derive the same order for the messages they share. Throws InvalidArgument naming task and receiver when the contributions of a range
/// are incomplete or come twice.
std::vector<core::Message> orderedMessages(const core::ReshardingPlan& plan, int64_t global_rank, int64_t max_message_bytes);

}  // namespace xmesh::runtime
