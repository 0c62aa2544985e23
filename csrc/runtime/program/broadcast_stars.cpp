#include "runtime/program/broadcast_stars.h"

#include <algorithm>
#include <set>

namespace xmesh::runtime {
namespace {

using core::Message;
using core::Payload;

using Range = std::tuple<int64_t, int64_t, int64_t>;  ///< task, begin, end

Range rangeOf(const Message& message) { return {message.task, message.begin, message.end}; }

/// Who passes each range on to whom.
class Trees {
 public:
  explicit Trees(const core::ReshardingPlan& plan) {
    for (const Message& message : plan.messages) {
      if (message.payload == Payload::kValue) {
        giver_[{rangeOf(message), message.dst_rank}] = message.src_rank;
      }
    }
    for (const Message& message : plan.messages) {
      if (message.payload == Payload::kValue) {
        receivers_[{rangeOf(message), rootOf(message)}].push_back(message.dst_rank);
      }
    }
  }

  int32_t rootOf(const Message& message) const {
    int32_t rank = message.src_rank;
    for (auto found = giver_.find({rangeOf(message), rank}); found != giver_.end(); found = giver_.find({rangeOf(message), rank})) {
      rank = found->second;
    }
    return rank;
  }
  const std::vector<int32_t>& receivers(const Range& range, int32_t root) const { return receivers_.at({range, root}); }

 private:
  std::map<std::pair<Range, int32_t>, int32_t> giver_;
  std::map<std::pair<Range, int32_t>, std::vector<int32_t>> receivers_;
};

}  // namespace

BroadcastStars starsOf(const core::ReshardingPlan& plan, int64_t max_message_bytes) {
  BroadcastStars out;
  out.plan = plan;
  out.plan.messages.clear();
  const Trees trees(plan);
  std::set<std::pair<Range, int32_t>> placed;
  std::map<std::vector<int64_t>, int32_t> known;
  for (const Message& message : plan.messages) {
    if (message.payload != Payload::kValue) {
      out.plan.messages.push_back(message);
      continue;
    }
    const int32_t root = trees.rootOf(message);
    if (!placed.insert({rangeOf(message), root}).second) {
      continue;
    }
    const std::vector<int32_t>& receivers = trees.receivers(rangeOf(message), root);
    int32_t circle = -1;
    if (receivers.size() > 1) {
      std::vector<int64_t> ranks(receivers.begin(), receivers.end());
      ranks.push_back(root);
      std::sort(ranks.begin(), ranks.end());
      const auto [found, is_new] = known.try_emplace(ranks, static_cast<int32_t>(out.circles.size()));
      if (is_new) {
        out.circles.push_back(std::move(ranks));
      }
      circle = found->second;
    }
    const int64_t max_elements = std::max<int64_t>(1, max_message_bytes / plan.itemBytes(plan.tasks[static_cast<size_t>(message.task)]));
    for (int64_t begin = message.begin; begin < message.end; begin += max_elements) {
      Message part = message;
      part.begin = begin;
      part.end = std::min(message.end, begin + max_elements);
      part.src_rank = root;
      for (const int32_t receiver : receivers) {
        part.dst_rank = receiver;
        out.plan.messages.push_back(part);
        if (circle >= 0) {
          out.circle[{part.task, part.begin, part.end, root, receiver}] = circle;
        }
      }
    }
  }
  return out;
}

}  // namespace xmesh::runtime
