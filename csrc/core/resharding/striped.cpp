#include <algorithm>
#include <bit>
#include <optional>
#include <utility>
#include <vector>

#include "core/resharding/chunk_schedule.h"
#include "core/resharding/message_expander.h"
#include "core/resharding/network.h"
#include "core/resharding/shipments.h"
#include "core/resharding/simulate.h"
#include "core/resharding/static_schedule.h"
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
double goodEnough(const Shipments& shipments, const LinkModel& links) {
  const double fill = static_cast<double>(std::bit_width(static_cast<uint64_t>(shipments.largest_fan)) - 1);
  const double chunk_s = shipments.bottleneck_s / std::max(1.0, shipments.num_chunks);
  const double messages_s = 1e-6 * links.message_us * std::max(shipments.num_chunks, static_cast<double>(shipments.most_messages));
  return 1.003 * (shipments.bottleneck_s + messages_s) + fill * (chunk_s + 1e-6 * links.message_us) + 2e-6 * links.latency_us;
}

/// Counts what planning has cost so far, in operations and never in time, so that every rank stops alike.
class Work {
 public:
  /// About what one more event-driven schedule costs, beyond messages: every transfer weighs some receivers.
  static int64_t ofSchedule(const Shipments& shipments, const Network& network, bool is_matched) {
    const int64_t hosts = network.numHosts();
    int64_t num_transfers = 0;
    for (const Atom& atom : shipments.atoms) {
      num_transfers += static_cast<int64_t>(atom.receivers.size());
    }
    const auto words = static_cast<int64_t>(shipments.atoms.size() / 64 + 1);
    return num_transfers * std::min<int64_t>(hosts, 64) * (is_matched ? hosts : 1) * words;
  }
  void spend(int64_t operations) { spent_ += operations; }
  bool allows(int64_t operations) const { return spent_ + operations <= kMost; }

 private:
  static constexpr int64_t kMost = 8'000'000;
  int64_t spent_ = 0;
};

/// Keeps the fastest of several lists of messages.
class BestMessages {
 public:
  BestMessages(ReshardingPlan& plan, const Network& network) : plan_(plan), network_(network) {}

  void consider(const Shipments& shipments, const std::vector<AtomTransfer>& transfers, Work& work) {
    constexpr int64_t kPerMessage = 300;
    plan_.messages.clear();
    expandTransfers(plan_, network_, shipments, transfers);
    work.spend(kPerMessage * static_cast<int64_t>(plan_.messages.size()));
    const double found_s = simulatedSeconds(plan_, network_);
    if (seconds_ < 0 || found_s < seconds_) {
      seconds_ = found_s;
      messages_ = std::move(plan_.messages);
    }
  }
  bool isEmpty() const { return seconds_ < 0; }
  double seconds() const { return seconds_; }
  std::vector<Message> take() { return std::move(messages_); }

 private:
  ReshardingPlan& plan_;
  const Network& network_;
  double seconds_ = -1;
  std::vector<Message> messages_;
};

void planStriped(ReshardingPlan& plan, const Strategy& strategy) {
  const Network network(plan);
  const int64_t num_chunks = strategy.option("num_chunks");
  const Shipments levelled = shipmentsOf(plan, network, num_chunks);
  std::optional<Shipments> concentrated;
  const double goal = goodEnough(levelled, plan.topology.links());
  Work work;
  BestMessages best(plan, network);
  const StaticTransfers closed_form = staticTransfers(levelled, network, plan.topology.links());
  // Where what is passed on comes late by the latency, ports that never wait leave the closed form's order.
  const bool is_closed_form_exact = !closed_form.passes_on || plan.topology.links().latency_us == 0;
  if (is_closed_form_exact && !closed_form.list.empty()) {
    best.consider(levelled, closed_form.list, work);
  }
  for (const auto& [has_few_owners, taste] : attempts()) {
    const int64_t operations = Work::ofSchedule(levelled, network, taste.is_matched);
    if (!best.isEmpty() && (best.seconds() <= goal || !work.allows(operations))) {
      break;
    }
    if (has_few_owners && !concentrated) {
      concentrated = shipmentsOf(plan, network, num_chunks, true);
    }
    const Shipments& shipments = has_few_owners ? *concentrated : levelled;
    work.spend(operations);
    best.consider(shipments, scheduleAtoms(shipments, network, taste), work);
  }
  if (!is_closed_form_exact && best.seconds() > goal && work.allows(0)) {
    best.consider(levelled, closed_form.list, work);
  }
  plan.predicted_seconds = best.seconds();
  plan.messages = best.take();
}

}  // namespace

StrategyInfo stripedStrategy() {
  return {"striped", "slices split over all their holders, chunks passed on by receivers, in an order decided chunk by chunk",
          {},        {{"num_chunks", 0, 0}},
          true,      planStriped};
}

}  // namespace xmesh::core
