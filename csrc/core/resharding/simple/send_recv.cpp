#include "core/resharding/simple/slice_messenger.h"
#include "core/resharding/strategy_registry.h"

namespace xmesh::core {
namespace {

void planSendRecv(ReshardingPlan& plan, const Strategy& /*strategy*/) {
  SliceMessenger messenger(plan);
  for (size_t task = 0; task < plan.tasks.size(); ++task) {
    for (int64_t needer : messenger.lackingNeeders(task)) {
      messenger.sendDirect(task, needer);
    }
  }
  messenger.finish();
}

}  // namespace

StrategyInfo sendRecvStrategy() {
  return {"send_recv", "one message per needer and slice from one of its holders", {}, {}, isAlwaysCandidate, planSendRecv};
}

}  // namespace xmesh::core
