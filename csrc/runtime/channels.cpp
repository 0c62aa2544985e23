#include "runtime/channels.h"

#include <algorithm>
#include <vector>

namespace xmesh::runtime {

int32_t channelOf(const core::ReshardingPlan& plan, const core::Message& message) {
  const core::Holders& holders = plan.holders[static_cast<size_t>(plan.tasks[static_cast<size_t>(message.task)].holders)];
  const std::vector<int64_t>& first = holders.contributions.front();
  const bool is_from_holder = holders.contributions.size() == 1 && std::binary_search(first.begin(), first.end(), int64_t{message.src_rank});
  const bool is_passed_on = message.payload == core::Payload::kValue && !is_from_holder;
  return is_passed_on ? 1 + static_cast<int32_t>(message.task % (kNumChannels - 1)) : 0;
}

}  // namespace xmesh::runtime
