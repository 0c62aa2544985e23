#include <cstdint>
#include <vector>

#include "core/resharding/simple/slice_messenger.h"
#include "core/resharding/strategy_registry.h"

namespace xmesh::core {
namespace {

void planAlpa(ReshardingPlan& plan, const Strategy& /*strategy*/) {
  SliceMessenger messenger(plan);
  for (size_t task = 0; task < plan.tasks.size(); ++task) {
    const std::vector<int64_t> needers = messenger.lackingNeeders(task);
    if (needers.empty()) {
      continue;
    }
    if (numElements(plan.tasks[task].box) % static_cast<int64_t>(needers.size()) == 0) {
      messenger.scatterAndGather(task, needers);
      continue;
    }
    for (int64_t needer : needers) {
      messenger.sendDirect(task, needer);
    }
  }
  messenger.finish();
}

}  // namespace

StrategyInfo alpaStrategy() {
  return {"alpa", "an all-gather over all receivers of a slice where it divides evenly, else one message per receiver", {}, {}, nullptr, planAlpa};
}

}  // namespace xmesh::core
