#include <algorithm>

#include "core/resharding/chunking.h"
#include "core/resharding/holder_choice.h"
#include "core/resharding/network.h"
#include "core/resharding/strategy_list.h"

namespace xmesh::core {
namespace {

void planSendRecv(ReshardingPlan& plan, const Strategy& /*strategy*/) {
  const Network network(plan);
  Timeline timeline(plan, network);
  HolderChoice choice(network);
  for (size_t task = 0; task < plan.tasks.size(); ++task) {
    const UnitTask& unit = plan.tasks[task];
    const std::vector<std::vector<int64_t>>& contributions = plan.holders[static_cast<size_t>(unit.holders)].contributions;
    const int64_t num_elements = numElements(unit.box);
    const int64_t item_bytes = plan.itemBytes(unit);
    const int64_t chunk = chunkElementsOf(kMaxChunkBytes, item_bytes);
    for (int64_t needer : plan.needers[static_cast<size_t>(unit.needers)]) {
      for (size_t contribution = 0; contribution < contributions.size(); ++contribution) {
        const std::vector<int64_t>& holders = contributions[contribution];
        if (std::binary_search(holders.begin(), holders.end(), needer)) {
          continue;
        }
        Message message{.task = static_cast<int64_t>(task), .begin = 0, .end = 0, .src_rank = 0, .dst_rank = static_cast<int32_t>(needer)};
        message.src_rank = static_cast<int32_t>(choice.choose(holders, needer, num_elements * item_bytes));
        message.contribution = contributions.size() > 1 ? static_cast<int32_t>(contribution) : 0;
        message.payload = contributions.size() > 1 ? Payload::kContribution : Payload::kValue;
        for (message.begin = 0; message.begin < num_elements; message.begin = message.end) {
          message.end = std::min(num_elements, message.begin + chunk);
          timeline.place(message, 0);
        }
      }
    }
  }
  timeline.finish();
}

}  // namespace

StrategyInfo sendRecvStrategy() { return {"send_recv", "one message per needer and slice from one of its holders", {}, {}, planSendRecv}; }

}  // namespace xmesh::core
