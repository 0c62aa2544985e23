#include "core/resharding/strategy_registry.h"

#include "core/error.h"
#include "core/text.h"

namespace xmesh::core {

const std::vector<StrategyInfo>& strategies() {
  static const std::vector<StrategyInfo> all = {stripedStrategy(),        broadcastStrategy(),       sendRecvStrategy(),
                                                localAllgatherStrategy(), globalAllgatherStrategy(), alpaStrategy()};
  return all;
}

const StrategyInfo& strategyInfo(std::string_view name) {
  for (const StrategyInfo& info : strategies()) {
    if (info.name == name) {
      return info;
    }
  }
  throw InvalidArgument("unknown strategy '" + std::string(name) + "'; there are: " + describeStrategies());
}

std::string describeStrategies() {
  std::vector<std::string> names;
  for (const StrategyInfo& info : strategies()) {
    std::vector<std::string> slots;
    for (const WordSlot& slot : info.words) {
      slots.push_back(joined(slot.choices, "|"));
    }
    std::vector<std::string> fields;
    if (!slots.empty()) {
      fields.push_back(joined(slots, "+"));
    }
    for (const IntegerOption& option : info.options) {
      fields.push_back(option.name + "=" + std::to_string(option.default_value));
    }
    names.push_back(info.name + (fields.empty() ? "" : ":" + joined(fields, ",")));
  }
  names.emplace_back("auto");
  return joined(names, "; ");
}

}  // namespace xmesh::core
