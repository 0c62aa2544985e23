#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/resharding/network.h"
#include "core/resharding/plan.h"
#include "core/resharding/strategy.h"

namespace xmesh::core {

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
  bool (*is_candidate)(const ReshardingPlan& plan,
                       const Network& network) = nullptr;  ///< whether "auto" tries it for a plan with tasks; null: for none
  void (*plan)(ReshardingPlan& plan, const Strategy& strategy) = nullptr;
};

/// A candidate for every plan.
inline bool isAlwaysCandidate(const ReshardingPlan& /*plan*/, const Network& /*network*/) { return true; }

/// All strategies; "auto" itself is not among them. It tries its candidates in this order, and looks at the first one alone where that one's plan is
/// large (planResharding).
const std::vector<StrategyInfo>& strategies();
/// Throws InvalidArgument listing names, words and options when there is none of that name.
const StrategyInfo& strategyInfo(std::string_view name);
/// Names, words and options of all strategies in one line, for errors.
std::string describeStrategies();

// One function per strategy, each in the file of its name; strategies() lists them.

/// One message per needer and slice from one of its holders.
StrategyInfo sendRecvStrategy();
/// AlpaComm (MLSys'23, section 3): one sender per unit task, a chunked chain over the receiving hosts and over the devices of each.
StrategyInfo broadcastStrategy();
/// Each receiving host gets a slice once, in parts over its devices, which gather them locally.
StrategyInfo localAllgatherStrategy();
/// A slice goes in parts to all its receivers, which gather them in a ring.
StrategyInfo globalAllgatherStrategy();
/// Alpa's rule: the all-gather over all receivers where the slice divides by their number, else send_recv.
StrategyInfo alpaStrategy();

/// Slices split over all their holders, chunks passed on by receivers, in an order decided chunk by chunk.
StrategyInfo stripedStrategy();

}  // namespace xmesh::core
