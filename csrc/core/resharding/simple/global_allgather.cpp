#include "core/resharding/simple/slice_messenger.h"
#include "core/resharding/strategy_registry.h"

namespace xmesh::core {
namespace {

void planGlobalAllgather(ReshardingPlan& plan, const Strategy& /*strategy*/) {
  SliceMessenger messenger(plan);
  for (size_t task = 0; task < plan.tasks.size(); ++task) {
    messenger.scatterAndGather(task, messenger.lackingNeeders(task));
  }
  messenger.finish();
}

}  // namespace

StrategyInfo globalAllgatherStrategy() {
  return {"global_allgather", "a slice in parts over all its receivers, then a ring over all of them", {}, {}, nullptr, planGlobalAllgather};
}

}  // namespace xmesh::core
