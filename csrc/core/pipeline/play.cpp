#include "core/pipeline/play.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <queue>

#include "core/error.h"
#include "core/pipeline/nic_sharing.h"

namespace xmesh::core {
namespace {

double actionSeconds(const StageCost& stage, ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
      return stage.forward_s;
    case ActionKind::kBackward:
      return stage.backward_s;
    case ActionKind::kBackwardInput:
      return stage.backward_input_s;
    case ActionKind::kBackwardWeight:
      return stage.backward_weight_s;
  }
  throw InvalidArgument("no such kind of action: " + std::to_string(static_cast<int>(kind)));
}

/// 1 - noise to 1 + noise, the same for equal arguments (splitmix64).
double factorOf(const ScheduleCosts& costs, int64_t index) {
  if (costs.noise == 0) {
    return 1;
  }
  uint64_t bits = costs.noise_seed + 0x9e3779b97f4a7c15ULL * static_cast<uint64_t>(index + 1);
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ULL;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebULL;
  bits ^= bits >> 31;
  return 1 + costs.noise * (2 * static_cast<double>(bits >> 11) / 9007199254740992.0 - 1);
}

struct Event {
  double time_s;
  enum class Kind : uint8_t { kComputed, kArrived } kind;
  int32_t index;  ///< node, or transfer

  auto operator<=>(const Event&) const = default;
};

/// A value's way from a node to another; or what a node's stage sums at the end of a step, which nobody waits for.
struct ValueFlow {
  int32_t producer;
  int32_t user;  ///< -1: nobody
  NicFlow flow;
  TransferSpan span;
};

/// What happens on one place at the moment.
struct PlaceState {
  bool is_computing = false;
  bool has_news = true;           ///< something it may wait for has happened since it was looked at
  int32_t num_incoming = 0;       ///< transfers on their way to it
  int32_t num_unsent_values = 0;  ///< values of the last action that are ready and not yet sent
};

class Simulation {
 public:
  Simulation(const ActionTable& table, const ScheduleCosts& costs, Chooser& chooser)
      : table_(table),
        costs_(costs),
        chooser_(chooser),
        blocks_receiver_(!costs.overlap && costs.blocks_receiver),
        waits_for_(static_cast<size_t>(table.numNodes()), 0),
        flows_(2 * table.schedule().numPlaces()) {  // of each place its NIC, and behind all these the links inside its host
    local_dependents_.resize(waits_for_.size());
    transfers_of_.resize(waits_for_.size());
    adding_left_.resize(static_cast<size_t>(table_.schedule().num_stages), 0);
    for (int32_t node = 0; node < table_.numNodes(); ++node) {
      for (const ActionTable::Dependency& dependency : table_.dependenciesOf(node)) {
        addDependency(dependency, node);
      }
      adding_left_[static_cast<size_t>(table_.action(node).stage)] += adds(node) ? 1 : 0;
    }
    places_.resize(static_cast<size_t>(table_.schedule().numPlaces()));
    out_.busy_s.resize(places_.size(), 0);
  }

  SimulatedSchedule run() {
    startActions(0);
    startTransfers(0);
    while (!events_.empty() || !flows_.isEmpty()) {
      const double now = nextTime();
      out_.makespan_s = now;
      finishAll(now);
      if (blocks_receiver_) {
        startActions(now);
        startTransfers(now);
        continue;
      }
      startTransfers(now);
      if (nextTime() > now) {  // all that is there by now is known before a place chooses
        startActions(now);
        startTransfers(now);
      }
    }
    for (const ValueFlow& transfer : transfers_) {
      out_.transfers.push_back(transfer.span);
    }
    std::stable_sort(out_.transfers.begin(), out_.transfers.end(), [](const auto& a, const auto& b) { return a.start_s < b.start_s; });
    return std::move(out_);
  }

 private:
  bool adds(int32_t node) const { return flightChangeOf(table_.action(node).kind) == FlightChange::kEnds; }
  PlaceState& place(int32_t node) { return places_[static_cast<size_t>(table_.placeOf(node))]; }

  void addDependency(const ActionTable::Dependency& dependency, int32_t node) {
    ++waits_for_[static_cast<size_t>(node)];
    const Action& user = table_.action(node);
    const double seconds = dependency.edge < 0 ? 0 : secondsOf(costs_.edges[static_cast<size_t>(dependency.edge)], user.kind);
    const bool is_within = table_.placeOf(dependency.node) == table_.placeOf(node);
    if (is_within && (seconds == 0 || !costs_.edges[static_cast<size_t>(dependency.edge)].is_resharded)) {
      local_dependents_[static_cast<size_t>(dependency.node)].push_back(node);
      return;
    }
    transfers_of_[static_cast<size_t>(dependency.node)].push_back(static_cast<int32_t>(transfers_.size()));
    const double taken = seconds * factorOf(costs_, -2 - static_cast<int64_t>(transfers_.size()));
    const NicFlow flow = is_within ? flowWithin(node, taken) : NicFlow{table_.placeOf(dependency.node), table_.placeOf(node), taken};
    transfers_.push_back({dependency.node, node, flow, {table_.action(dependency.node).stage, user.stage, user.microbatch, 0, 0, 0}});
  }

  void finish(const Event& event) {
    if (event.kind == Event::Kind::kComputed) {
      PlaceState& state = place(event.index);
      state.is_computing = false;
      state.has_news = true;
      for (int32_t node : local_dependents_[static_cast<size_t>(event.index)]) {
        --waits_for_[static_cast<size_t>(node)];
      }
      for (int32_t transfer : transfers_of_[static_cast<size_t>(event.index)]) {
        transfers_[static_cast<size_t>(transfer)].span.ready_s = event.time_s;
        pending_.push_back(transfer);
        ++state.num_unsent_values;
      }
      if (adds(event.index)) {
        sumAtEnd(event);
      }
      return;
    }
    const int32_t user = transfers_[static_cast<size_t>(event.index)].user;
    if (user < 0) {
      return;
    }
    --waits_for_[static_cast<size_t>(user)];
    place(user).has_news = true;
  }

  double secondsOf(const EdgeCost& edge, ActionKind user) const {
    const TransferCost& cost = crossingOf(user) == Crossing::kValues ? edge.forward : edge.backward;
    return cost.seconds + (cost.num_bytes > 0 ? static_cast<double>(cost.num_bytes) / costs_.nic_bytes_per_s : 0);
  }

  /// Among the devices of a node's place.
  NicFlow flowWithin(int32_t node, double seconds) const {
    const auto stage = static_cast<size_t>(table_.action(node).stage);
    const bool is_inside = !costs_.is_on_one_host.empty() && costs_.is_on_one_host[stage] != 0;
    const int32_t at = table_.placeOf(node) + (is_inside ? table_.schedule().numPlaces() : 0);
    return {at, at, seconds};
  }

  /// Behind a stage's last B or W its gradients leave.
  void sumAtEnd(const Event& event) {
    const int32_t stage = table_.action(event.index).stage;
    const double seconds = costs_.stages[static_cast<size_t>(stage)].sums_s;
    if (--adding_left_[static_cast<size_t>(stage)] > 0 || seconds == 0) {
      return;
    }
    const int32_t index = static_cast<int32_t>(transfers_.size());
    const NicFlow flow = flowWithin(event.index, seconds * factorOf(costs_, -2 - static_cast<int64_t>(index)));
    transfers_.push_back({event.index, -1, flow, {stage, stage, -1, 0, 0, 0}});
    transfers_.back().span.ready_s = event.time_s;
    pending_.push_back(index);
  }

  void finishSending(int32_t index, double now) {
    ValueFlow& transfer = transfers_[static_cast<size_t>(index)];
    if (transfer.user >= 0) {
      --place(transfer.producer).num_unsent_values;
      --place(transfer.user).num_incoming;
      place(transfer.producer).has_news = place(transfer.user).has_news = true;  // without overlap they may have waited for that
    }
    transfer.span.end_s = now + costs_.latency_s;
    events_.push({transfer.span.end_s, Event::Kind::kArrived, index});
  }

  double nextTime() const { return std::min(flows_.nextEnd(), events_.empty() ? std::numeric_limits<double>::infinity() : events_.top().time_s); }

  void finishAll(double now) {
    for (int32_t transfer : flows_.endedBy(now)) {
      finishSending(transfer, now);
    }
    while (!events_.empty() && events_.top().time_s == now) {
      const Event event = events_.top();
      events_.pop();
      finish(event);
    }
  }

  void startActions(double now) {
    for (int32_t index = 0; index < static_cast<int32_t>(places_.size()); ++index) {
      bool& has_news = places_[static_cast<size_t>(index)].has_news;
      if (has_news) {
        has_news = false;
        startAction(index, now);
      }
    }
  }

  void startTransfers(double now) {
    std::erase_if(pending_, [&](int32_t index) { return startTransfer(index, now); });
    flows_.share(now);
  }

  void startAction(int32_t index, double now) {
    PlaceState& state = places_[static_cast<size_t>(index)];
    const bool is_blocked = (!costs_.overlap && state.num_unsent_values > 0) || (blocks_receiver_ && state.num_incoming > 0);
    if (state.is_computing || is_blocked) {
      return;
    }
    const int32_t node = chooser_.choose(index, waits_for_);
    if (node < 0) {
      return;
    }
    const Action& action = table_.action(node);
    const double seconds = actionSeconds(costs_.stages[static_cast<size_t>(action.stage)], action.kind) * factorOf(costs_, node);
    state.is_computing = true;
    out_.busy_s[static_cast<size_t>(index)] += seconds;
    out_.actions.push_back({index, action, now, now + seconds});
    events_.push({now + seconds, Event::Kind::kComputed, node});
  }

  /// False where it must wait.
  bool startTransfer(int32_t index, double now) {
    ValueFlow& transfer = transfers_[static_cast<size_t>(index)];
    PlaceState& receiver = place(transfer.user >= 0 ? transfer.user : transfer.producer);
    if (flows_.isBusy(transfer.flow) || (blocks_receiver_ && (receiver.is_computing || receiver.num_incoming > 0))) {
      return false;
    }
    receiver.num_incoming += transfer.user >= 0 ? 1 : 0;
    transfer.span.start_s = now;
    flows_.start(index, transfer.flow, now);
    return true;
  }

  const ActionTable& table_;
  const ScheduleCosts& costs_;
  Chooser& chooser_;
  const bool blocks_receiver_;
  std::vector<int32_t> waits_for_;                      ///< by node: values and actions that are not there yet
  std::vector<std::vector<int32_t>> local_dependents_;  ///< by node
  std::vector<std::vector<int32_t>> transfers_of_;      ///< by producing node
  std::vector<ValueFlow> transfers_;
  std::vector<int32_t> adding_left_;  ///< by stage: B and W that have not ended
  std::vector<PlaceState> places_;
  NicSharing flows_;
  std::vector<int32_t> pending_;  ///< transfers whose value exists, oldest first
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  SimulatedSchedule out_;
};

}  // namespace

InOrder::InOrder(const ActionTable& table, const ScheduleCosts& costs)
    : table_(table), costs_(costs), has_run_(static_cast<size_t>(table.numNodes()), false), next_adding_(has_run_.size(), 0) {
  const bool may_run_early = std::find(costs.runs_weights_early.begin(), costs.runs_weights_early.end(), 1) != costs.runs_weights_early.end();
  const std::vector<int32_t>& group_of = costs.weights_group;
  for (int32_t place = 0; place < table.schedule().numPlaces(); ++place) {
    next_.push_back(table.firstNode(place));
    std::vector<int32_t>& adding = adding_.emplace_back();
    if (!may_run_early) {
      continue;
    }
    std::map<int32_t, int32_t> first_of_group;
    for (int32_t node = table.firstNode(place + 1) - 1; node >= table.firstNode(place); --node) {
      const Action& action = table.action(node);
      if (flightChangeOf(action.kind) == FlightChange::kEnds) {
        const int32_t group = group_of.empty() ? 0 : group_of[static_cast<size_t>(action.stage)];
        const auto [first, is_last] = first_of_group.emplace(group, table.firstNode(place + 1));
        next_adding_[static_cast<size_t>(node)] = first->second;
        first->second = node;
      }
    }
    for (const auto& [group, first] : first_of_group) {
      adding.push_back(first);
    }
  }
}

int32_t InOrder::choose(int32_t place, const std::vector<int32_t>& waits_for) {
  int32_t& next = next_[static_cast<size_t>(place)];
  const int32_t end = table_.firstNode(place + 1);
  while (next < end && has_run_[static_cast<size_t>(next)]) {
    ++next;
  }
  if (next == end) {
    return -1;
  }
  const auto isReady = [&](int32_t node) { return waits_for[static_cast<size_t>(node)] == 0; };
  if (isReady(next)) {
    has_run_[static_cast<size_t>(next)] = true;
    return next;
  }
  int32_t early = end;
  for (int32_t& adding : adding_[static_cast<size_t>(place)]) {
    while (adding < end && has_run_[static_cast<size_t>(adding)]) {
      adding = next_adding_[static_cast<size_t>(adding)];
    }
    if (adding < early && table_.action(adding).kind == ActionKind::kBackwardWeight && isReady(adding) &&
        costs_.runs_weights_early[static_cast<size_t>(table_.action(adding).stage)] != 0) {
      early = adding;
    }
  }
  if (early == end) {
    return -1;
  }
  has_run_[static_cast<size_t>(early)] = true;
  return early;
}

SimulatedSchedule play(const ActionTable& table, const ScheduleCosts& costs, Chooser& chooser) { return Simulation(table, costs, chooser).run(); }

}  // namespace xmesh::core
