#include "runtime/program/reduction_trees.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "runtime/program/plan_checks.h"

namespace xmesh::runtime {
namespace {

using core::Message;
using core::Payload;
using core::ReshardingPlan;

/// The reductions of elements [begin, end) of one task; all messages given carry all of them.
class RangeTrees {
 public:
  RangeTrees(const ReshardingPlan& plan, const std::vector<size_t>& messages, core::Interval range)
      : plan_(plan), task_(plan.messages[messages.front()].task), range_(range) {
    holders_ = &plan.holders.at(static_cast<size_t>(plan.tasks[static_cast<size_t>(task_)].holders));
    for (size_t index : messages) {
      add(index);
    }
  }

  void appendTo(std::vector<ReductionTree>& out) {
    for (const auto& [rank, inputs] : inputs_of_) {
      if (!givers_.contains(rank)) {
        out.push_back(treeOf(rank));
      }
    }
  }

 private:
  /// A message into a reduction and the lowest contribution in it.
  struct Input {
    int64_t lowest = 0;
    size_t message = 0;
  };

  const Message& messageAt(size_t index) const { return plan_.messages[index]; }
  std::string at(int64_t rank) const {
    return "contributions to " + taskStr(plan_, task_) + " at rank " + std::to_string(rank) + ": elements [" + std::to_string(range_.begin) + ", " +
           std::to_string(range_.end) + ") ";
  }

  void add(size_t index) {
    const Message& message = messageAt(index);
    for (int64_t rank : {message.src_rank, message.dst_rank}) {
      core::require(!givers_.contains(rank), at(rank) + "are used after the rank has given its sum of them away");
    }
    const int64_t own = contributionOf(*holders_, message.src_rank);
    Input input{message.contribution, index};
    if (message.payload == Payload::kPartialSum) {
      const auto found = inputs_of_.find(message.src_rank);
      core::require(found != inputs_of_.end(), at(message.src_rank) + "are to be sent on before the rank received any");
      input.lowest = found->second.front().lowest;
      for (const Input& received : found->second) {
        input.lowest = std::min(input.lowest, received.lowest);
      }
      input.lowest = own >= 0 ? std::min(input.lowest, own) : input.lowest;
      givers_.insert(message.src_rank);
    } else {
      core::require(own == message.contribution, at(message.dst_rank) + "are to come from rank " + std::to_string(message.src_rank) +
                                                     ", which does not hold contribution " + std::to_string(message.contribution));
    }
    inputs_of_[message.dst_rank].push_back(input);
  }

  ReductionTree treeOf(int64_t root) {
    ReductionTree tree{plan_.messages.size(), range_.begin, range_.end, {}};
    std::vector<int64_t> counts(holders_->contributions.size(), 0);
    append(root, tree, counts);
    for (size_t c = 0; c < counts.size(); ++c) {
      core::require(counts[c] == 1, at(root) + (counts[c] == 0 ? "lack contribution " : "get more than once contribution ") + std::to_string(c));
    }
    return tree;
  }

  /// What a rank receives, the lowest contributions first, each after what its sender receives.
  void append(int64_t rank, ReductionTree& tree, std::vector<int64_t>& counts) {
    const int64_t own = contributionOf(*holders_, rank);
    if (own >= 0) {
      ++counts[static_cast<size_t>(own)];
    }
    std::vector<Input>& inputs = inputs_of_.at(rank);
    std::stable_sort(inputs.begin(), inputs.end(), [](const Input& a, const Input& b) { return a.lowest < b.lowest; });
    for (const Input& input : inputs) {
      Message message = messageAt(input.message);
      if (message.payload == Payload::kPartialSum) {
        append(message.src_rank, tree, counts);
      } else {
        ++counts[static_cast<size_t>(input.lowest)];
      }
      message.begin = range_.begin;
      message.end = range_.end;
      message.contribution = static_cast<int32_t>(input.lowest);
      tree.messages.push_back(message);
      tree.first = std::min(tree.first, input.message);
    }
  }

  const ReshardingPlan& plan_;
  const int64_t task_;
  const core::Interval range_;
  const core::Holders* holders_ = nullptr;
  std::map<int64_t, std::vector<Input>> inputs_of_;  ///< by receiving rank
  std::set<int64_t> givers_;                         ///< ranks that have sent their sum on
};

/// The trees of one task, from its contributions and partial sums (indices of messages in plan order).
void appendTrees(const ReshardingPlan& plan, const std::vector<size_t>& messages, std::vector<ReductionTree>& out) {
  std::vector<int64_t> cuts;
  for (size_t index : messages) {
    cuts.push_back(plan.messages[index].begin);
    cuts.push_back(plan.messages[index].end);
  }
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  std::vector<std::vector<size_t>> messages_of_range(cuts.size());
  for (size_t index : messages) {
    auto cut = static_cast<size_t>(std::lower_bound(cuts.begin(), cuts.end(), plan.messages[index].begin) - cuts.begin());
    for (; cuts[cut] < plan.messages[index].end; ++cut) {
      messages_of_range[cut].push_back(index);
    }
  }
  for (size_t cut = 0; cut + 1 < cuts.size(); ++cut) {
    if (!messages_of_range[cut].empty()) {
      RangeTrees(plan, messages_of_range[cut], {cuts[cut], cuts[cut + 1]}).appendTo(out);
    }
  }
}

}  // namespace

std::vector<bool> tasksWithSums(const ReshardingPlan& plan) {
  std::vector<bool> out;
  for (const Message& message : plan.messages) {
    if (message.payload == Payload::kPartialSum) {
      checkMessage(plan, message);
      out.resize(plan.tasks.size());
      out[static_cast<size_t>(message.task)] = true;
    }
  }
  return out;
}

std::vector<ReductionTree> reductionTrees(const ReshardingPlan& plan, const std::vector<bool>& has_sums, int64_t global_rank) {
  std::map<int64_t, std::vector<size_t>> messages_of_task;
  for (size_t i = 0; i < plan.messages.size() && !has_sums.empty(); ++i) {
    const Message& message = plan.messages[i];
    checkMessage(plan, message);
    if (message.payload != Payload::kValue && message.begin < message.end && has_sums[static_cast<size_t>(message.task)]) {
      messages_of_task[message.task].push_back(i);
    }
  }
  const auto involvesRank = [&](const Message& message) { return involves(message, global_rank); };
  std::vector<ReductionTree> out;
  for (const auto& [task, messages] : messages_of_task) {
    if (std::any_of(messages.begin(), messages.end(), [&](size_t i) { return involvesRank(plan.messages[i]); })) {
      appendTrees(plan, messages, out);
    }
  }
  std::erase_if(out, [&](const ReductionTree& tree) { return std::none_of(tree.messages.begin(), tree.messages.end(), involvesRank); });
  std::stable_sort(out.begin(), out.end(),
                   [](const ReductionTree& a, const ReductionTree& b) { return std::tie(a.first, a.begin) < std::tie(b.first, b.begin); });
  return out;
}

}  // namespace xmesh::runtime
