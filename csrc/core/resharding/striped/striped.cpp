#include <algorithm>
#include <bit>
#include <optional>
#include <utility>
#include <vector>

#include "core/resharding/network.h"
#include "core/resharding/simulate.h"
#include "core/resharding/strategy_registry.h"
#include "core/resharding/striped/chunk_schedule.h"
#include "core/resharding/striped/cut.h"
#include "core/resharding/striped/message_expander.h"
#include "core/resharding/striped/static_schedule.h"

namespace xmesh::core {
namespace {

/// One way of scheduling the chunks of one of two splits.
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

/// The pipeline's fill in chunks: a chain of sums, then one root reaches p hosts in ceil(log2(p + 1)) steps.
double fillOf(const Cut& cut) { return static_cast<double>(cut.longest_chain + std::bit_width(static_cast<uint64_t>(cut.largest_fan)) - 1); }

/// The busiest port's time with its messages' cost, and the fill's.
double goodEnough(const Cut& cut, const LinkModel& links, double fill) {
  const double chunk_s = cut.bottleneck_s / std::max(1.0, cut.chunks_per_port);
  const double messages_s = 1e-6 * links.message_us * std::max(cut.chunks_per_port, static_cast<double>(cut.most_messages));
  return 1.003 * (cut.bottleneck_s + messages_s) + fill * (chunk_s + 1e-6 * links.message_us) + 2e-6 * links.latency_us;
}

/// Counts what planning has cost so far, in operations and never in time, so that every rank stops alike.
class Work {
 public:
  /// About what one more event-driven schedule costs, beyond messages: every hop weighs some receivers.
  static int64_t ofSchedule(const Cut& cut, const Network& network, bool is_matched) {
    const int64_t hosts = network.numHosts();
    int64_t num_hops = 0;
    for (const Chunk& chunk : cut.chunks) {
      num_hops += static_cast<int64_t>(chunk.receivers.size());
    }
    const auto words = static_cast<int64_t>(cut.chunks.size() / 64 + 1);
    return num_hops * std::min<int64_t>(hosts, 64) * (is_matched ? hosts : 1) * words;
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

  void consider(const Cut& cut, const std::vector<ChunkHop>& hops, Work& work) {
    constexpr int64_t kPerMessage = 300;
    plan_.messages.clear();
    expandHops(plan_, network_, cut, hops);
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

/// Schedules chunks in one way after the other until one is good enough.
class StripedSearch {
 public:
  StripedSearch(ReshardingPlan& plan, int64_t num_chunks) : plan_(plan), num_chunks_(num_chunks), network_(plan), best_(plan, network_) {}

  /// Contributions come as a star, which is quickest for what is small. Where some value has several, a chain is tried first if its busiest port
  /// is less busy, and is kept if the star's port alone would take longer.
  void run() {
    const Cut star = cutIntoChunks(plan_, network_, {.num_chunks = num_chunks_});
    if (star.most_partials > 1) {
      const CutOptions options{.num_chunks = num_chunks_, .reduction_way = ReductionWay::kChain};
      const Cut chain = cutIntoChunks(plan_, network_, options);
      if (chain.bottleneck_s < star.bottleneck_s) {
        schedule(chain, options);
      }
    }
    if (best_.isEmpty() || star.bottleneck_s < best_.seconds()) {
      schedule(star, {.num_chunks = num_chunks_});
    }
    plan_.predicted_seconds = best_.seconds();
    plan_.messages = best_.take();
  }

 private:
  void schedule(const Cut& levelled, CutOptions options) {
    std::optional<Cut> concentrated;
    const LinkModel& links = plan_.topology.links();
    const StaticHops closed_form = staticHops(levelled, network_, links);
    double goal = goodEnough(levelled, links, closed_form.is_ring ? 1 : fillOf(levelled));  // a ring too long for few chunks has to be the best
    bool is_first = true;
    // Where what is passed on comes late by the latency, ports that never wait leave the closed form's order.
    const bool is_closed_form_exact = !closed_form.passes_on || links.latency_us == 0;
    if (is_closed_form_exact && !closed_form.list.empty()) {
      best_.consider(levelled, closed_form.list, work_);
      is_first = false;
    }
    for (const auto& [has_few_owners, taste] : attempts()) {
      const int64_t operations = Work::ofSchedule(levelled, network_, taste.is_matched);
      if (!is_first && (best_.seconds() <= goal || !work_.allows(operations))) {
        break;
      }
      if (has_few_owners && !concentrated) {
        options.has_few_owners = true;
        concentrated = cutIntoChunks(plan_, network_, options);
      }
      const Cut& cut = has_few_owners ? *concentrated : levelled;
      work_.spend(operations);
      best_.consider(cut, scheduleChunks(cut, network_, taste), work_);
      is_first = false;
      goal = goodEnough(levelled, links, fillOf(levelled));
    }
    if (!is_closed_form_exact && best_.seconds() > goal && work_.allows(0)) {
      best_.consider(levelled, closed_form.list, work_);
    }
  }

  ReshardingPlan& plan_;
  int64_t num_chunks_;
  Network network_;
  Work work_;
  BestMessages best_;
};

void planStriped(ReshardingPlan& plan, const Strategy& strategy) { StripedSearch(plan, strategy.option("num_chunks")).run(); }

}  // namespace

StrategyInfo stripedStrategy() {
  return {"striped",
          "slices split over all their holders, chunks passed on by receivers, in an order decided chunk by chunk",
          {},
          {{"num_chunks", 0, 0}},
          isAlwaysCandidate,
          planStriped};
}

}  // namespace xmesh::core
