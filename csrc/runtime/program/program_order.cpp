#include "runtime/program/program_order.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "core/error.h"
#include "runtime/program/plan_checks.h"
#include "runtime/program/reduction_trees.h"

namespace xmesh::runtime {
namespace {

using core::Message;
using core::Payload;
using core::ReshardingPlan;

/// All contributions of one task to one receiver.
struct Group {
  int64_t task = 0;
  int64_t dst_rank = 0;
  bool is_placed = false;
  std::vector<Message> messages;
};

using GroupIndex = std::map<std::pair<int64_t, int64_t>, size_t>;  ///< by (task, receiver)

std::string groupStr(const ReshardingPlan& plan, const Group& group) {
  return "contributions to " + taskStr(plan, group.task) + " at rank " + std::to_string(group.dst_rank);
}

/// Sorts by contribution; returns where each one's messages begin, and checks that none overlap.
std::vector<size_t> sortByContribution(const ReshardingPlan& plan, Group& group, size_t num_contributions) {
  std::stable_sort(group.messages.begin(), group.messages.end(),
                   [](const Message& a, const Message& b) { return std::pair(a.contribution, a.begin) < std::pair(b.contribution, b.begin); });
  std::vector<size_t> begins(num_contributions + 1, group.messages.size());
  for (size_t i = group.messages.size(); i-- > 0;) {
    const Message& message = group.messages[i];
    core::require(message.contribution >= 0 && std::cmp_less(message.contribution, num_contributions),
                  groupStr(plan, group) + ": there is no contribution " + std::to_string(message.contribution));
    const bool follows = i > 0 && group.messages[i - 1].contribution == message.contribution;
    core::require(!follows || group.messages[i - 1].end <= message.begin,
                  groupStr(plan, group) + ": contribution " + std::to_string(message.contribution) + " comes twice");
    begins[static_cast<size_t>(message.contribution)] = i;
  }
  for (size_t c = num_contributions; c-- > 0;) {
    begins[c] = std::min(begins[c], begins[c + 1]);
  }
  return begins;
}

std::vector<int64_t> cutsOf(const Group& group) {
  std::vector<int64_t> cuts;
  for (const Message& message : group.messages) {
    cuts.push_back(message.begin);
    cuts.push_back(message.end);
  }
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  return cuts;
}

/// Appends the group's messages that involve the rank, range by range.
void appendGroup(const ReshardingPlan& plan, Group& group, int64_t global_rank, int64_t max_message_bytes, std::vector<Message>& out) {
  const core::UnitTask& task = plan.tasks[static_cast<size_t>(group.task)];
  const core::Holders& holders = plan.holders.at(static_cast<size_t>(task.holders));
  const int64_t own = contributionOf(holders, group.dst_rank);
  const size_t num_contributions = holders.contributions.size();
  const std::vector<size_t> begins = sortByContribution(plan, group, num_contributions);
  std::vector<size_t> cursors(begins.begin(), begins.end() - 1);
  const int64_t max_elements = std::max<int64_t>(1, max_message_bytes / plan.accumulatorItemBytes(task));
  const std::vector<int64_t> cuts = cutsOf(group);
  std::vector<Message> range;
  for (size_t cut = 0; cut + 1 < cuts.size(); ++cut) {
    range.clear();
    for (size_t c = 0; c < num_contributions; ++c) {
      while (cursors[c] < begins[c + 1] && group.messages[cursors[c]].end <= cuts[cut]) {
        ++cursors[c];
      }
      if (cursors[c] < begins[c + 1] && group.messages[cursors[c]].begin <= cuts[cut]) {
        core::require(std::cmp_not_equal(c, own), groupStr(plan, group) + ": contribution " + std::to_string(c) + " is the receiver's own");
        range.push_back(group.messages[cursors[c]]);
      }
    }
    core::require(range.empty() || range.size() + (own >= 0 ? 1 : 0) == num_contributions,
                  groupStr(plan, group) + ": elements [" + std::to_string(cuts[cut]) + ", " + std::to_string(cuts[cut + 1]) + ") get " +
                      std::to_string(range.size() + (own >= 0 ? 1 : 0)) + " of " + std::to_string(num_contributions) + " contributions");
    for (int64_t begin = cuts[cut]; begin < cuts[cut + 1]; begin += max_elements) {
      for (Message message : range) {
        message.begin = begin;
        message.end = std::min(cuts[cut + 1], begin + max_elements);
        if (involves(message, global_rank)) {
          out.push_back(message);
        }
      }
    }
  }
}

/// Appends a tree's messages that involve the rank, the whole tree once for each part of at most `max_message_bytes`.
void appendTree(const ReshardingPlan& plan, const ReductionTree& tree, int64_t global_rank, int64_t max_message_bytes, std::vector<Message>& out) {
  const core::UnitTask& task = plan.tasks[static_cast<size_t>(tree.messages.front().task)];
  const int64_t max_elements = std::max<int64_t>(1, max_message_bytes / plan.accumulatorItemBytes(task));
  for (int64_t begin = tree.begin; begin < tree.end; begin += max_elements) {
    for (Message message : tree.messages) {
      message.begin = begin;
      message.end = std::min(tree.end, begin + max_elements);
      if (involves(message, global_rank)) {
        out.push_back(message);
      }
    }
  }
}

/// Whether no message waits for another and some are cut.
bool isCutAndDirect(const ReshardingPlan& plan, int64_t max_message_bytes) {
  const auto isCut = [&](const Message& message) { return plan.numBytes(message) > max_message_bytes; };
  const auto isDirect = [&plan](const Message& message) { return plan.isSentByHolder(message); };
  return std::any_of(plan.messages.begin(), plan.messages.end(), isCut) && std::all_of(plan.messages.begin(), plan.messages.end(), isDirect);
}

/// Sorts by the part of its pair's bytes that comes before the message, so that all pairs come along together.
void sortByFraction(const ReshardingPlan& plan, std::vector<Message>& messages) {
  std::map<std::pair<int32_t, int32_t>, int64_t> bytes_of;
  std::vector<int64_t> before;
  for (const Message& message : messages) {
    int64_t& bytes = bytes_of[{message.src_rank, message.dst_rank}];
    before.push_back(bytes);
    bytes += plan.numBytes(message);
  }
  std::vector<std::pair<double, Message>> keyed;
  for (size_t i = 0; i < messages.size(); ++i) {
    const int64_t all = bytes_of.at({messages[i].src_rank, messages[i].dst_rank});
    keyed.emplace_back(static_cast<double>(before[i]) / static_cast<double>(all), messages[i]);
  }
  std::stable_sort(keyed.begin(), keyed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::transform(keyed.begin(), keyed.end(), messages.begin(), [](const auto& entry) { return entry.second; });
}

/// All contributions by (task, receiver) that involve the rank, but those to tasks with partial sums.
class Groups {
 public:
  Groups(const ReshardingPlan& plan, const std::vector<bool>& has_sums, int64_t global_rank) : has_sums_(has_sums) {
    for (const Message& message : plan.messages) {
      if (isGrouped(message) && involves(message, global_rank)) {
        const auto [entry, is_new] = index_.try_emplace({message.task, message.dst_rank}, groups_.size());
        if (is_new) {
          groups_.push_back({message.task, message.dst_rank, false, {}});
        }
      }
    }
    for (size_t i = 0; i < plan.messages.size() && !groups_.empty(); ++i) {
      Group* group = find(plan.messages[i]);
      if (group != nullptr) {
        checkMessage(plan, plan.messages[i]);
        group->messages.push_back(plan.messages[i]);
      }
    }
  }

  bool isGrouped(const Message& message) const {
    return message.payload == Payload::kContribution && message.begin < message.end &&
           (has_sums_.empty() || !has_sums_.at(static_cast<size_t>(message.task)));
  }
  /// The group of a message, or null.
  Group* find(const Message& message) {
    const auto found = isGrouped(message) ? index_.find({message.task, message.dst_rank}) : index_.end();
    return found == index_.end() ? nullptr : &groups_[found->second];
  }

 private:
  const std::vector<bool>& has_sums_;
  GroupIndex index_;
  std::vector<Group> groups_;
};

}  // namespace

std::vector<Message> orderedMessages(const ReshardingPlan& plan, int64_t global_rank, int64_t max_message_bytes) {
  const std::vector<bool> has_sums = tasksWithSums(plan);
  const std::vector<ReductionTree> trees = reductionTrees(plan, has_sums, global_rank);
  auto tree = trees.begin();
  Groups groups(plan, has_sums, global_rank);
  std::vector<Message> out;
  for (size_t i = 0; i < plan.messages.size(); ++i) {
    const Message& message = plan.messages[i];
    for (; tree != trees.end() && tree->first == i; ++tree) {
      appendTree(plan, *tree, global_rank, max_message_bytes, out);
    }
    if (message.begin == message.end) {
      continue;
    }
    Group* group = groups.find(message);
    if (group != nullptr && !group->is_placed) {
      group->is_placed = true;
      appendGroup(plan, *group, global_rank, max_message_bytes, out);
    } else if (message.payload == Payload::kValue && involves(message, global_rank)) {
      checkMessage(plan, message);
      const int64_t max_elements = std::max<int64_t>(1, max_message_bytes / plan.itemBytes(plan.tasks[static_cast<size_t>(message.task)]));
      for (int64_t begin = message.begin; begin < message.end; begin += max_elements) {
        out.push_back(message);
        out.back().begin = begin;
        out.back().end = std::min(message.end, begin + max_elements);
      }
    }
  }
  if (isCutAndDirect(plan, max_message_bytes)) {
    sortByFraction(plan, out);
  }
  return out;
}

}  // namespace xmesh::runtime
