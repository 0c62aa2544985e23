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

/// Whether something is added up within one host for several of its ranks: they divide the sum among them, where striped, which divides among hosts,
/// has one rank do all of it.
bool sumsWithinAHost(const ReshardingPlan& plan, const Network& network) {
  return std::any_of(plan.tasks.begin(), plan.tasks.end(), [&](const UnitTask& task) {
    const std::vector<std::vector<int64_t>>& contributions = plan.holders[static_cast<size_t>(task.holders)].contributions;
    const std::vector<int64_t>& needers = plan.needers[static_cast<size_t>(task.needers)];
    if (contributions.size() < 2 || needers.size() < 2) {
      return false;
    }
    const auto isHere = [&](int64_t rank) { return network.hostOfGlobal(rank) == network.hostOfGlobal(needers.front()); };
    return std::all_of(needers.begin(), needers.end(), isHere) && std::all_of(contributions.begin(), contributions.end(), [&](const auto& holders) {
             return std::any_of(holders.begin(), holders.end(), isHere);
           });
  });
}

}  // namespace

StrategyInfo localAllgatherStrategy() {
  return {
      "local_allgather", "each receiving host gets (or adds up) a slice once, in parts, and gathers them over its own links", {}, {}, sumsWithinAHost,
      planLocalAllgather};
}

}  // namespace xmesh::core
