#include "runtime/program/validate_groups.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/resharding/validate.h"

namespace xmesh::runtime {
namespace {

using core::Message;
using core::Payload;

class Check {
 public:
  Check(const std::vector<Message>& ordered, const std::vector<int32_t>& groups) : ordered_(ordered), groups_(groups) {}

  void run(const std::vector<int32_t>& circle_of) {
    for (size_t i = 0; i < ordered_.size(); ++i) {
      const Message& message = ordered_[i];
      std::optional<size_t>& last = last_of_pair_[{message.src_rank, message.dst_rank}];
      comesLater(last, i, last.has_value() && travelAsOne(ordered_[*last], message) ? 0 : 1, "are of one pair of ranks");
      if (message.payload != Payload::kValue) {
        comesLater(last_of_sums_[message.dst_rank], i, 0, "belong to sums of one rank");
      }
      if (message.payload == Payload::kPartialSum) {
        comesLater(last_of_sums_[message.src_rank], i, 0, "belong to sums of one rank");
      }
      for (const int32_t rank : {message.src_rank, message.dst_rank}) {
        isAlone(circle_of, i, rank);
      }
    }
  }

 private:
  /// Where they are of one pair and in one group.
  static bool travelAsOne(const Message& a, const Message& b) { return a.payload != Payload::kPartialSum && b.payload != Payload::kPartialSum; }
  /// The message before of some kind, if any, is `least` groups before message i, or more.
  void comesLater(std::optional<size_t>& last, size_t i, int32_t least, const std::string& what) {
    if (last.has_value() && groups_[i] < groups_[*last] + least) {
      fail(*last, i, what);
    }
    last = i;
  }
  /// A broadcast shares its group on a rank with its own messages only.
  void isAlone(const std::vector<int32_t>& circle_of, size_t i, int32_t rank) {
    const auto [other, is_new] = any_of_group_.try_emplace({rank, groups_[i]}, i);
    const Message& a = ordered_[other->second];
    const Message& b = ordered_[i];
    const bool is_same = circle_of[other->second] == circle_of[i] && a.src_rank == b.src_rank && a.task == b.task && a.begin == b.begin;
    if (!is_new && (circle_of[other->second] >= 0 || circle_of[i] >= 0) && !is_same) {
      fail(other->second, i, "are of a broadcast and of something else");
    }
  }

  [[noreturn]] void fail(size_t a, size_t b, const std::string& what) const {
    throw core::InvalidArgument(messageStr(a) + " and " + messageStr(b) + " " + what + ": in these groups they would wait for each other");
  }
  std::string messageStr(size_t i) const {
    const Message& message = ordered_[i];
    return "message " + std::to_string(i) + " (" + std::to_string(message.src_rank) + " -> " + std::to_string(message.dst_rank) + ", group " +
           std::to_string(groups_[i]) + ")";
  }

  const std::vector<Message>& ordered_;
  const std::vector<int32_t>& groups_;
  std::map<std::pair<int32_t, int32_t>, std::optional<size_t>> last_of_pair_;
  std::map<int32_t, std::optional<size_t>> last_of_sums_;
  std::map<std::pair<int32_t, int32_t>, size_t> any_of_group_;  ///< by rank and group: some message
};

}  // namespace

void validateGroups(const core::ReshardingPlan& plan, const std::vector<Message>& ordered, const std::vector<int32_t>& circle_of,
                    const std::vector<int32_t>& groups) {
  Check(ordered, groups).run(circle_of);
  // Group after group, each in reverse: who sends in a group has what it sends before.
  std::vector<size_t> order(ordered.size());
  std::iota(order.rbegin(), order.rend(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return groups[a] < groups[b]; });
  core::ReshardingPlan regrouped = plan;
  regrouped.messages.clear();
  std::transform(order.begin(), order.end(), std::back_inserter(regrouped.messages), [&](size_t i) { return ordered[i]; });
  core::validatePlan(regrouped);
}

}  // namespace xmesh::runtime
