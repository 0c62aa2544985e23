#pragma once

#include <cstdint>
#include <vector>

#include "core/resharding/plan.h"

namespace xmesh::runtime {

/// What a message takes of staging memory.
inline int64_t stagedBytes(int64_t num_bytes) { return (num_bytes + 63) / 64 * 64; }

/// In which group each message of a plan moves where messages have no tags (see transport::StreamTransport). On every rank, the messages of one number
/// are one group, and groups run in ascending order.
///
/// `ordered`: all messages in the order of execution (orderedMessages of every rank). `circle_of`: by message, the broadcast's circle (see
/// BroadcastStars), or -1; the messages of one broadcast are neighbors. `max_bytes`: of memory that a rank may need for a group's messages and the sum
/// that it works on; one message always fits. Each message gets the lowest number that keeps these rules, so the same on every rank:
///
/// | rule | why |
/// |---|---|
/// | above the numbers of what brings its sender what it sends | groups are packed before they move |
/// | above the number of the pair's message before (a pair: sender and receiver) | a group runs in passes: the second message of a pair would wait |
/// | of what a rank receives for sums, and of the sums it sends: not below the one before | a rank works on one sum at a time |
/// | a group's bytes are bounded, on both ends | staging memory is bounded |
/// | a broadcast is alone in its group on each of its ranks, above all that they have in hand | it is an entry of the stream by itself |
///
/// No deadlock: take the lowest number of which some message has not moved. On all ranks every group below has ended, so all ranks with such a message
/// run this group. It holds one message of each pair, hence one pass. Where a pass is cut into batches, both ends put a message into the same one, and
/// run them in one order; the messages of the first batch that has not ended have begun on both ends, and complete.
std::vector<int32_t> messageGroups(const core::ReshardingPlan& plan, const std::vector<core::Message>& ordered, const std::vector<int32_t>& circle_of,
                                   int64_t max_bytes);

}  // namespace xmesh::runtime
