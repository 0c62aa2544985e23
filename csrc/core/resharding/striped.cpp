#include <bit>
#include <optional>
#include <utility>
#include <vector>

#include "core/resharding/chunk_schedule.h"
#include "core/resharding/message_expander.h"
#include "core/resharding/network.h"
#include "core/resharding/shipments.h"
#include "core/resharding/simulate.h"
#include "core/resharding/strategy_list.h"

namespace xmesh::core {
namespace {

/// One way of scheduling the atoms of one of two splits.
struct Attempt {
  bool has_few_owners = false;
  ScheduleTaste taste;
};

/// Tried in this order until one is good enough.
const std::vector<Attempt>& attempts() {
  static const std::vector<Attempt> all = {
      {false, {.fill_weight = 0.5, .is_newest_first = false, .is_matched = false}},
      {false, {.fill_weight = 0.5, .is_newest_first = true, .is_matched = true}},
      {true, {.fill_weight = 0.5, .is_newest_first = true, .is_matched = true}},
      {false, {.fill_weight = 0.5, .is_newest_first = true, .is_matched = true, .uses_relays = true}},
      {false, {.fill_weight = 0.0, .is_newest_first = false, .is_matched = true}},
      {false, {.fill_weight = 0.5, .is_newest_first = false, .is_matched = false, .uses_relays = true}},
      {true, {.fill_weight = 0.5, .is_newest_first = false, .is_matched = false}},
  };
  return all;
}

/// The busiest port's time with its messages' cost, and the pipeline's fill: one root reaches p hosts in ceil(log2(p + 1)) steps.
double goodEnough(const Shipments& shipments, const LinkModel& links, double slowest_rate) {
  const double chunk_s = static_cast<double>(shipments.chunk_bytes) / slowest_rate;
  const double num_chunks = chunk_s > 0 ? shipments.bottleneck_s / chunk_s : 0;
  const double fill = static_cast<double>(std::bit_width(static_cast<uint64_t>(shipments.largest_fan)) - 1);
  return 1.003 * (shipments.bottleneck_s + num_chunks * 1e-6 * links.message_us) + fill * chunk_s + 2e-6 * links.latency_us;
}

void planStriped(ReshardingPlan& plan, const Strategy& strategy) {
  constexpr size_t kMostMessages = 16'384;  // of all attempts together, so that planning time is bounded
  const Network network(plan);
  const int64_t num_chunks = strategy.option("num_chunks");
  const Shipments levelled = shipmentsOf(plan, network, num_chunks);
  std::optional<Shipments> concentrated;
  const double goal = goodEnough(levelled, plan.topology.links(), static_cast<double>(plan.topology.links().nic_bytes_per_s));
  double best_seconds = 0;
  size_t num_messages = 0;
  std::vector<Message> best;
  for (size_t i = 0; i < attempts().size(); ++i) {
    const auto& [has_few_owners, taste] = attempts()[i];
    if (has_few_owners && !concentrated) {
      concentrated = shipmentsOf(plan, network, num_chunks, true);
    }
    const Shipments& shipments = has_few_owners ? *concentrated : levelled;
    const std::vector<AtomTransfer> transfers = scheduleAtoms(shipments, network, taste);
    plan.messages.clear();
    expandTransfers(plan, network, shipments, transfers);
    num_messages += plan.messages.size();
    const double seconds = simulatedSeconds(plan, network);
    if (i == 0 || seconds < best_seconds) {
      best_seconds = seconds;
      best = std::move(plan.messages);
    }
    if (best_seconds <= goal || num_messages > kMostMessages) {
      break;
    }
  }
  plan.messages = std::move(best);
}

}  // namespace

StrategyInfo stripedStrategy() {
  return {"striped", "slices split over all their holders, chunks passed on by receivers, in an order decided chunk by chunk",
          {},        {{"num_chunks", 0, 0}},
          true,      planStriped};
}

}  // namespace xmesh::core
