#include <algorithm>
#include <cstddef>
#include <vector>

#include "core/resharding/simple/slice_messenger.h"
#include "core/resharding/strategy_registry.h"

namespace xmesh::core {
namespace {

void planLocalAllgather(ReshardingPlan& plan, const Strategy& /*strategy*/) {
  SliceMessenger messenger(plan);
  for (size_t task = 0; task < plan.tasks.size(); ++task) {
    const std::vector<int64_t> needers = messenger.lackingNeeders(task);
    for (size_t begin = 0, end = 0; begin < needers.size(); begin = end) {
      const int32_t host = messenger.network().hostOfGlobal(needers[begin]);
      while (end < needers.size() && messenger.network().hostOfGlobal(needers[end]) == host) {
        ++end;
      }
      messenger.scatterAndGather(task, {needers.begin() + static_cast<std::ptrdiff_t>(begin), needers.begin() + static_cast<std::ptrdiff_t>(end)});
    }
  }
  messenger.finish();
}

/// Whether the plan reduces something for several ranks, all within one host: they divide the sum among them, where striped, which divides among
/// hosts, has one rank do all of it.
bool sumsOnOneHost(const ReshardingPlan& plan) {
  return Network(plan).numHosts() == 1 && std::any_of(plan.tasks.begin(), plan.tasks.end(), [&](const UnitTask& task) {
           return plan.holders[static_cast<size_t>(task.holders)].contributions.size() > 1 &&
                  plan.needers[static_cast<size_t>(task.needers)].size() > 1;
         });
}

}  // namespace

StrategyInfo localAllgatherStrategy() {
  return {"local_allgather", "each receiving host gets a slice once, in parts, and gathers them over its own links", {}, {}, sumsOnOneHost,
          planLocalAllgather};
}

}  // namespace xmesh::core
