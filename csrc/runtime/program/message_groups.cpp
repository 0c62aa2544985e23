#include "runtime/program/message_groups.h"

#include <algorithm>
#include <map>
#include <utility>

#include "runtime/program/plan_checks.h"
#include "runtime/program/program_order.h"
#include "runtime/program/validate_groups.h"

namespace xmesh::runtime {
namespace {

using core::Message;
using core::Payload;

bool isOfSameBroadcast(const Message& a, const Message& b) {
  return a.src_rank == b.src_rank && a.task == b.task && a.begin == b.begin && a.end == b.end;
}

/// What has come of one task to one rank: element ranges, with the group of the last message that brought some of one.
class Received {
 public:
  void add(int64_t begin, int64_t end, int32_t group) {
    int32_t& last = ranges_[{begin, end}];
    last = std::max(last, group);
    longest_ = std::max(longest_, end - begin);
  }
  /// The last group that brought elements of [begin, end); -1 where none did.
  int32_t lastOf(int64_t begin, int64_t end) const {
    int32_t last = -1;
    for (auto it = ranges_.lower_bound({begin - longest_, 0}); it != ranges_.end() && it->first.first < end; ++it) {
      last = it->first.second > begin ? std::max(last, it->second) : last;
    }
    return last;
  }

 private:
  std::map<std::pair<int64_t, int64_t>, int32_t> ranges_;
  int64_t longest_ = 0;
};

/// What one rank has in its groups so far.
struct RankGroups {
  std::vector<int64_t> bytes;  ///< by group
  int64_t sum_bytes = 0;       ///< of the largest sum that the rank works on
  int32_t first_free = 0;      ///< behind the last broadcast
  int32_t last_of_sums = 0;
};

/// The last message of a pair, with what travels with it.
struct PairGroups {
  int32_t group = -1;
  int64_t bytes = 0;
  bool leaves_accumulator = false;
};

class Grouping {
 public:
  Grouping(const core::ReshardingPlan& plan, const GroupLimits& limits) : plan_(plan), limits_(limits) {}

  void lookAhead(const std::vector<Message>& ordered) {
    for (const Message& message : ordered) {
      if (message.payload == Payload::kPartialSum || (message.payload == Payload::kValue && !plan_.isSentByHolder(message))) {
        received_.try_emplace({message.task, message.src_rank});
      }
      if (message.payload != Payload::kValue) {
        int64_t& bytes = ranks_[message.dst_rank].sum_bytes;
        bytes = std::max(bytes, stagedBytes((message.end - message.begin) * plan_.accumulatorItemBytes(taskOf(message))));
      }
    }
  }

  int32_t place(const Message& message) {
    RankGroups& from = ranks_[message.src_rank];
    RankGroups& to = ranks_[message.dst_rank];
    PairGroups& pair = pairs_[{message.src_rank, message.dst_rank}];
    const int64_t num_bytes = stagedBytes(plan_.numBytes(message));
    const bool may_join = !pair.leaves_accumulator && message.payload != Payload::kPartialSum && pair.bytes + num_bytes <= limits_.joined_bytes;
    int32_t group = std::max({from.first_free, to.first_free, pair.group + (may_join ? 0 : 1), firstAfterInputs(message)});
    if (message.payload != Payload::kValue) {
      group = std::max(group, to.last_of_sums);
    }
    if (message.payload == Payload::kPartialSum) {
      group = std::max(group, from.last_of_sums);
    }
    while (!hasRoom(from, group, num_bytes) || !hasRoom(to, group, num_bytes)) {
      ++group;
    }
    if (message.payload != Payload::kValue) {
      to.last_of_sums = group;
    }
    if (message.payload == Payload::kPartialSum) {
      from.last_of_sums = group;
    }
    pair = {group, (group == pair.group ? pair.bytes : 0) + num_bytes, message.payload == Payload::kPartialSum};
    addBytes(from, group, num_bytes);
    addBytes(to, group, num_bytes);
    noteReceived(message, group);
    return group;
  }

  /// The messages of one broadcast.
  int32_t placeBroadcast(const Message* begin, const Message* end) {
    int32_t group = firstAfterInputs(*begin);
    const auto is_behind = [&](int32_t rank) { group = std::max({group, ranks_[rank].first_free, static_cast<int32_t>(ranks_[rank].bytes.size())}); };
    is_behind(begin->src_rank);
    std::for_each(begin, end, [&](const Message& message) { is_behind(message.dst_rank); });
    ranks_[begin->src_rank].first_free = group + 1;
    for (const Message* message = begin; message != end; ++message) {
      ranks_[message->dst_rank].first_free = group + 1;
      noteReceived(*message, group);
    }
    return group;
  }

 private:
  const core::UnitTask& taskOf(const Message& message) const { return plan_.tasks[static_cast<size_t>(message.task)]; }

  void noteReceived(const Message& message, int32_t group) {
    if (const auto found = received_.find({message.task, message.dst_rank}); found != received_.end()) {
      found->second.add(message.begin, message.end, group);
    }
  }
  int32_t firstAfterInputs(const Message& message) const {
    if (message.payload == Payload::kContribution) {
      return 0;
    }
    const auto received = received_.find({message.task, message.src_rank});
    return received == received_.end() ? 0 : received->second.lastOf(message.begin, message.end) + 1;
  }
  bool hasRoom(const RankGroups& rank, int32_t group, int64_t num_bytes) const {
    const int64_t used = std::cmp_less(group, rank.bytes.size()) ? rank.bytes[static_cast<size_t>(group)] : 0;
    return used == 0 || rank.sum_bytes + used + num_bytes <= limits_.bytes;
  }
  static void addBytes(RankGroups& rank, int32_t group, int64_t num_bytes) {
    if (std::cmp_greater_equal(group, rank.bytes.size())) {
      rank.bytes.resize(static_cast<size_t>(group) + 1, 0);
    }
    rank.bytes[static_cast<size_t>(group)] += num_bytes;
  }

  const core::ReshardingPlan& plan_;
  const GroupLimits limits_;
  std::map<int32_t, RankGroups> ranks_;
  std::map<std::pair<int32_t, int32_t>, PairGroups> pairs_;   ///< by sender and receiver
  std::map<std::pair<int64_t, int32_t>, Received> received_;  ///< by task and rank: of those that pass something on
};

}  // namespace

std::vector<int32_t> messageGroups(const core::ReshardingPlan& plan, const std::vector<Message>& ordered, const std::vector<int32_t>& circle_of,
                                   const GroupLimits& limits) {
  Grouping grouping(plan, limits);
  grouping.lookAhead(ordered);
  std::vector<int32_t> out;
  out.reserve(ordered.size());
  while (out.size() < ordered.size()) {
    const size_t begin = out.size();
    size_t end = begin + 1;
    if (circle_of[begin] < 0) {
      out.push_back(grouping.place(ordered[begin]));
      continue;
    }
    while (end < ordered.size() && isOfSameBroadcast(ordered[begin], ordered[end]) && circle_of[end] == circle_of[begin]) {
      ++end;
    }
    out.resize(end, grouping.placeBroadcast(ordered.data() + begin, ordered.data() + end));
  }
  return out;
}

std::pair<std::vector<Message>, std::vector<int32_t>> groupedMessages(const core::ReshardingPlan& plan, int64_t global_rank,
                                                                      int64_t max_message_bytes, const GroupLimits& limits,
                                                                      const std::function<int32_t(const Message&)>& circle_of) {
  const std::vector<Message> all = orderedMessages(plan, kEveryRank, max_message_bytes);
  std::vector<int32_t> circles(all.size());
  std::transform(all.begin(), all.end(), circles.begin(), circle_of);
  const std::vector<int32_t> groups = messageGroups(plan, all, circles, limits);
#ifndef NDEBUG
  validateGroups(plan, all, circles, groups);
#endif
  std::pair<std::vector<Message>, std::vector<int32_t>> out;
  for (size_t i = 0; i < all.size(); ++i) {
    if (involves(all[i], global_rank)) {
      out.first.push_back(all[i]);
      out.second.push_back(groups[i]);
    }
  }
  return out;
}

}  // namespace xmesh::runtime
