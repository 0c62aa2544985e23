#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/resharding/plan.h"

namespace xmesh::core {

/// Which way to plan and its options; a plain value. Text form: name[:word+word][,option=number...], for example "send_recv", "broadcast",
/// "broadcast:naive+greedy,seed=3", "striped:num_chunks=64". Words and options that are not written have their defaults.
struct Strategy {
  std::string name = "auto";
  std::map<std::string, std::string> words;  ///< every word of the strategy by its slot ("senders" -> "size")
  std::map<std::string, int64_t> options;    ///< every option of the strategy by name ("seed" -> 0)

  const std::string& word(const std::string& slot) const { return words.at(slot); }
  int64_t option(const std::string& option_name) const { return options.at(option_name); }
  /// The one canonical spelling: defaults are left out; parseStrategy(str()) is the same value.
  std::string str() const;
  bool operator==(const Strategy&) const = default;
};

/// Throws InvalidArgument saying which strategies, words and options exist.
Strategy parseStrategy(std::string_view text);

/// A slot of a strategy's text form that takes one of several words; the first is the default.
struct WordSlot {
  std::string name;
  std::vector<std::string> choices;
};

/// An option with an integer value.
struct IntegerOption {
  std::string name;
  int64_t default_value = 0;
  int64_t min_value = 0;
};

/// Stands in ReshardingPlan::predicted_seconds while a plan is made.
constexpr double kNotPredicted = -1;

/// What the registry knows of a strategy. `plan` gets a plan with tensors, topology, tables and tasks and appends its messages; it is a pure
/// function of them (integer arithmetic or doubles in a fixed order, total-order ties), so that every rank plans alike. Where it has
/// simulated the messages that it appended, it sets predicted_seconds, which is kNotPredicted before.
struct StrategyInfo {
  std::string name;
  std::string summary;
  std::vector<WordSlot> words;
  std::vector<IntegerOption> options;
  bool is_candidate = false;  ///< "auto" tries it
  void (*plan)(ReshardingPlan& plan, const Strategy& strategy) = nullptr;
};

/// All strategies; "auto" itself is not among them. Its candidates come in the order in which it breaks ties.
const std::vector<StrategyInfo>& strategies();
/// Throws InvalidArgument listing the names when there is none of that name.
const StrategyInfo& strategyInfo(std::string_view name);

}  // namespace xmesh::core
