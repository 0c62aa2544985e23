#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "core/resharding/plan.h"

namespace xmesh::runtime {

/// What a message takes of staging memory.
inline int64_t stagedBytes(int64_t num_bytes) { return (num_bytes + 63) / 64 * 64; }

/// What a group may hold. The same on all ranks.
struct GroupLimits {
  int64_t bytes = 0;         ///< of memory that a rank may need for its messages and the sum that it works on; one message always fits
  int64_t joined_bytes = 0;  ///< up to which messages of one pair travel as one
};

/// In which group each message of a plan moves where messages have no tags (see transport::StreamTransport). On every rank, the messages of one
/// number are one group, and groups run in ascending order.
///
/// `ordered`: all messages in the order of execution (orderedMessages of every rank). `circle_of`: by message, the broadcast's circle (see
/// BroadcastStars), or -1; the messages of one broadcast are neighbors. Each message gets the lowest number that keeps these rules, so the same on
/// every rank:
///
/// - Above the numbers of what brings its sender what it sends: a group is packed before it moves.
/// - Above the number of the message before of the same pair (sender and receiver), since a group runs in passes: the second message of a pair
///   would wait for the first ones of all pairs. Or equal to it, and both travel as one, packed, up to joined_bytes. A partial sum travels alone.
/// - Of what a rank receives for sums, and of the sums that it sends: not below the one before, since it works on one sum at a time.
/// - What a rank needs for a group is bounded, on both ends.
/// - A broadcast is an entry of the stream by itself: above all numbers so far, on each of its ranks, and below all later ones.
///
/// No deadlock: take the lowest number of which some message has not moved. On all ranks every group below has ended, so all ranks with such a
/// message run this group. It moves one message of each pair, hence one pass. Where a pass is cut into batches, both ends put a message into the same
/// one, and run them in one order; the messages of the first batch that has not ended have begun on both ends, and complete.
std::vector<int32_t> messageGroups(const core::ReshardingPlan& plan, const std::vector<core::Message>& ordered, const std::vector<int32_t>& circle_of,
                                   const GroupLimits& limits);

/// The messages that `global_rank` sends or receives, as orderedMessages gives them, and the group of each. `circle_of`: by message, as above.
std::pair<std::vector<core::Message>, std::vector<int32_t>> groupedMessages(const core::ReshardingPlan& plan, int64_t global_rank,
                                                                            int64_t max_message_bytes, const GroupLimits& limits,
                                                                            const std::function<int32_t(const core::Message&)>& circle_of);

}  // namespace xmesh::runtime
