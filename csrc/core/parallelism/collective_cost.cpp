#include "core/parallelism/collective_cost.h"

#include <algorithm>

#include "core/error.h"

namespace xmesh::core {

const std::vector<CollectiveCostModel>& collectiveCostModels() {
  static const std::vector<CollectiveCostModel> all = {alpaCosts(), ringCosts(), glooCosts()};
  return all;
}

const CollectiveCostModel& collectiveCostModel(std::string_view name) {
  const std::vector<CollectiveCostModel>& all = collectiveCostModels();
  const auto found = std::find_if(all.begin(), all.end(), [&](const CollectiveCostModel& model) { return model.name == name; });
  if (found == all.end()) {
    std::string names;
    for (const CollectiveCostModel& model : all) {
      names += (names.empty() ? "" : ", ") + model.name;
    }
    throw InvalidArgument("there is no cost model of collectives named '" + std::string(name) + "': they are " + names);
  }
  return *found;
}

std::string_view collectiveName(Collective collective) {
  switch (collective) {
    case Collective::kAllReduce:
      return "all-reduce";
    case Collective::kAllGather:
      return "all-gather";
    case Collective::kReduceScatter:
      return "reduce-scatter";
    case Collective::kAllToAll:
      return "all-to-all";
  }
  return "";
}

Collective collectiveOf(std::string_view name) {
  for (const Collective one : {Collective::kAllReduce, Collective::kAllGather, Collective::kReduceScatter, Collective::kAllToAll}) {
    if (collectiveName(one) == name) {
      return one;
    }
  }
  throw InvalidArgument("there is no collective named '" + std::string(name) + "'");
}

}  // namespace xmesh::core
