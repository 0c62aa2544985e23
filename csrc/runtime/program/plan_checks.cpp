#include "runtime/program/plan_checks.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace xmesh::runtime {

using core::Message;
using core::ReshardingPlan;

void checkMessage(const ReshardingPlan& plan, const Message& message) {
  core::require(message.task >= 0 && std::cmp_less(message.task, plan.tasks.size()),
                "a message names task " + std::to_string(message.task) + " of " + std::to_string(plan.tasks.size()));
  const int64_t num_elements = core::numElements(plan.tasks[static_cast<size_t>(message.task)].box);
  core::require(0 <= message.begin && message.begin <= message.end && message.end <= num_elements,
                "a message of " + taskStr(plan, message.task) + " carries elements [" + std::to_string(message.begin) + ", " +
                    std::to_string(message.end) + ") of " + std::to_string(num_elements));
  core::require(message.src_rank != message.dst_rank,
                "rank " + std::to_string(message.src_rank) + " sends a message of " + taskStr(plan, message.task) + " to itself");
}

int64_t contributionOf(const core::Holders& holders, int64_t global_rank) {
  for (size_t c = 0; c < holders.contributions.size(); ++c) {
    if (std::binary_search(holders.contributions[c].begin(), holders.contributions[c].end(), global_rank)) {
      return static_cast<int64_t>(c);
    }
  }
  return -1;
}

std::string taskStr(const ReshardingPlan& plan, int64_t task) {
  const core::UnitTask& unit = plan.tasks.at(static_cast<size_t>(task));
  return "task " + std::to_string(task) + " (tensor " + std::to_string(unit.tensor) + ", " + core::boxStr(unit.box) + ")";
}

}  // namespace xmesh::runtime
