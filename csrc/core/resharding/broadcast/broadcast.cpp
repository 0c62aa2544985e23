#include <algorithm>
#include <map>
#include <utility>

#include "core/resharding/broadcast/sender_assignment.h"
#include "core/resharding/broadcast/unit_task_order.h"
#include "core/resharding/chunking.h"
#include "core/resharding/holder_choice.h"
#include "core/resharding/network.h"
#include "core/resharding/reducer_choice.h"
#include "core/resharding/strategy_registry.h"

namespace xmesh::core {
namespace {

/// One hop of a slice's tree, between stops: stop 0 and up are ranks in the order in which they get the slice.
struct Hop {
  int32_t src_rank = 0;
  int32_t dst_rank = 0;
  size_t src_stop = 0;
  size_t dst_stop = 0;
};

/// How one unit task travels: contributions to the root (Partial only), then the value down a tree of hops.
struct Route {
  size_t task = 0;
  int64_t root = -1;                                    ///< the reducing rank; -1 while a holder is to be chosen
  std::map<int32_t, std::vector<int64_t>> receivers;    ///< host -> needers that get the slice over its NIC, the first of them from outside
  std::map<int32_t, std::vector<int64_t>> local_chain;  ///< host -> a rank that has the slice, then the needers that it serves there
};

class BroadcastBuilder {
 public:
  BroadcastBuilder(ReshardingPlan& plan, const Strategy& strategy)
      : plan_(plan),
        strategy_(strategy),
        network_(plan),
        timeline_(plan, network_),
        choice_(network_),
        reducers_(plan, network_),
        device_of_(static_cast<size_t>(network_.numRanks())) {
    std::vector<int32_t> num_devices(static_cast<size_t>(network_.numHosts()));
    for (int32_t rank = 0; rank < network_.numRanks(); ++rank) {
      device_of_[static_cast<size_t>(rank)] = num_devices[static_cast<size_t>(network_.hostOf(rank))]++;
    }
  }

  void run() {
    std::vector<Route> remote;
    std::vector<Route> local;
    for (size_t task = 0; task < plan_.tasks.size(); ++task) {
      Route route = routeOf(task);
      (route.receivers.empty() ? local : remote).push_back(std::move(route));
    }
    const HostSchedule schedule = scheduleOf(remote);
    for (int32_t index : schedule.order) {
      Route& route = remote[static_cast<size_t>(index)];
      if (route.root < 0) {
        route.root = holderOn(route.task, schedule.sender[static_cast<size_t>(index)]);
      }
      enterBesideRoot(route);
      emit(route);
    }
    for (const Route& route : local) {
      emit(route);
    }
    timeline_.finish();
  }

 private:
  const std::vector<std::vector<int64_t>>& contributionsOf(size_t task) const {
    return plan_.holders[static_cast<size_t>(plan_.tasks[task].holders)].contributions;
  }

  /// The same device of a host for all tasks that it holds: a pair of ranks is first in, first out, and so keeps the tasks' order.
  int64_t holderOn(size_t task, int32_t host) const {
    const std::vector<int64_t>& holders = contributionsOf(task).front();
    return *std::find_if(holders.begin(), holders.end(), [&](int64_t rank) { return network_.hostOfGlobal(rank) == host; });
  }

  /// What different devices send at once enters a host at different devices, so that none waits behind another at the next hop.
  void enterBesideRoot(Route& route) const {
    const int32_t device = device_of_[static_cast<size_t>(network_.rankIndex(route.root))];
    for (auto& [host, ranks] : route.receivers) {
      std::rotate(ranks.begin(), ranks.begin() + device % static_cast<int64_t>(ranks.size()), ranks.end());
    }
  }

  Route routeOf(size_t task) {
    const UnitTask& unit = plan_.tasks[task];
    const std::vector<std::vector<int64_t>>& contributions = contributionsOf(task);
    const std::vector<int64_t>& needers = plan_.needers[static_cast<size_t>(unit.needers)];
    Route route{.task = task, .root = -1, .receivers = {}, .local_chain = {}};
    if (contributions.size() > 1) {
      route.root = reducers_.choose(task);
      route.local_chain[network_.hostOfGlobal(route.root)] = {route.root};
    } else {
      for (int64_t rank : contributions.front()) {
        route.local_chain.try_emplace(network_.hostOfGlobal(rank), std::vector<int64_t>{rank});
      }
    }
    for (int64_t rank : needers) {
      const bool has_it =
          rank == route.root || (contributions.size() == 1 && std::binary_search(contributions[0].begin(), contributions[0].end(), rank));
      const auto at_host = route.local_chain.find(network_.hostOfGlobal(rank));
      if (!has_it && at_host != route.local_chain.end()) {
        at_host->second.push_back(rank);
      } else if (!has_it) {
        route.receivers[network_.hostOfGlobal(rank)].push_back(rank);
      }
    }
    return route;
  }

  HostSchedule scheduleOf(const std::vector<Route>& routes) {
    std::vector<HostTask> tasks;
    for (const Route& route : routes) {
      HostTask& task = tasks.emplace_back();
      const UnitTask& unit = plan_.tasks[route.task];
      task.size = numElements(unit.box) * plan_.itemBytes(unit);
      for (const auto& [host, ranks] : route.receivers) {
        task.receivers.push_back(host);
      }
      if (route.root >= 0) {
        task.senders = {network_.hostOfGlobal(route.root)};
      } else if (strategy_.word("senders") == "naive") {
        task.senders = {network_.hostOfGlobal(contributionsOf(route.task).front().front())};
      } else {
        for (const auto& [host, chain] : route.local_chain) {
          task.senders.push_back(host);
        }
      }
    }
    std::vector<int64_t> rates;
    for (int32_t host = 0; host < network_.numHosts(); ++host) {
      rates.push_back(network_.nicBytesPerS(host));
    }
    const OrderSearch search{strategy_.word("order"), strategy_.option("seed"), strategy_.option("node_budget")};
    return orderTasks(tasks, assignSenders(tasks, rates, strategy_.word("senders")), network_.numHosts(), search);
  }

  /// The tree: a chain through the receiving hosts' first needers, and a chain inside every host. Stops 0.. are roots.
  std::vector<Hop> hopsOf(const Route& route, size_t& num_stops) const {
    std::vector<Hop> hops;
    num_stops = 1;
    const auto chain = [&](int64_t from, size_t stop, const std::vector<int64_t>& ranks, size_t skip) {
      for (size_t i = skip; i < ranks.size(); ++i) {
        hops.push_back({static_cast<int32_t>(from), static_cast<int32_t>(ranks[i]), stop, num_stops});
        from = ranks[i];
        stop = num_stops++;
      }
    };
    int64_t from = route.root;
    size_t stop = 0;
    std::vector<std::pair<const std::vector<int64_t>*, size_t>> entered;
    for (const auto& [host, ranks] : route.receivers) {
      hops.push_back({static_cast<int32_t>(from), static_cast<int32_t>(ranks.front()), stop, num_stops});
      from = ranks.front();
      stop = num_stops++;
      entered.emplace_back(&ranks, stop);
    }
    for (const auto& [ranks, first_stop] : entered) {
      chain(ranks->front(), first_stop, *ranks, 1);
    }
    for (const auto& [host, ranks] : route.local_chain) {
      chain(ranks.front(), 0, ranks, 1);
    }
    return hops;
  }

  int64_t chunkOf(const Route& route, int64_t num_bytes, int64_t item_bytes) const {
    const int64_t num_chunks = strategy_.option("num_chunks");
    if (num_chunks > 0 && !route.receivers.empty()) {
      return chunkElementsOf((plan_.lower_bound_bytes + num_chunks - 1) / num_chunks, item_bytes);
    }
    Pipeline pipeline{num_bytes, item_bytes, static_cast<int64_t>(route.receivers.size()), 0};
    for (const auto* chains : {&route.receivers, &route.local_chain}) {
      for (const auto& [host, ranks] : *chains) {
        pipeline.local_hops = std::max(pipeline.local_hops, static_cast<int64_t>(ranks.size()) - 1);
      }
    }
    pipeline.nic_hops += contributionsOf(route.task).size() > 1 ? 1 : 0;
    // Chunks far finer than the whole plan's pipeline only make it long.
    constexpr int64_t kFinestOfPlan = 1024;
    return std::max(chunkElements(pipeline, plan_.topology.links()), chunkElementsOf(plan_.lower_bound_bytes / kFinestOfPlan, item_bytes));
  }

  void emit(const Route& route) {
    const UnitTask& unit = plan_.tasks[route.task];
    const int64_t num_elements = numElements(unit.box);
    const int64_t item_bytes = plan_.itemBytes(unit);
    const std::vector<std::pair<int32_t, int32_t>> contributors = contributorsOf(route, num_elements * item_bytes);
    size_t num_stops = 0;
    const std::vector<Hop> hops = hopsOf(route, num_stops);
    const int64_t chunk = chunkOf(route, num_elements * item_bytes, item_bytes);
    std::vector<int64_t> ready(num_stops, 0);
    for (int64_t begin = 0; begin < num_elements; begin += chunk) {
      const int64_t end = std::min(num_elements, begin + chunk);
      Message message{.task = static_cast<int64_t>(route.task), .begin = begin, .end = end, .payload = Payload::kContribution};
      ready[0] = 0;
      for (const auto& [contribution, rank] : contributors) {
        message.contribution = contribution;
        message.src_rank = rank;
        message.dst_rank = static_cast<int32_t>(route.root);
        ready[0] = std::max(ready[0], timeline_.add(message, 0));
      }
      message.contribution = 0;
      message.payload = Payload::kValue;
      for (const Hop& hop : hops) {
        message.src_rank = hop.src_rank;
        message.dst_rank = hop.dst_rank;
        ready[hop.dst_stop] = timeline_.add(message, ready[hop.src_stop]);
      }
    }
  }

  /// (contribution, sender) of every contribution that the root lacks.
  std::vector<std::pair<int32_t, int32_t>> contributorsOf(const Route& route, int64_t num_bytes) {
    std::vector<std::pair<int32_t, int32_t>> out;
    const std::vector<std::vector<int64_t>>& contributions = contributionsOf(route.task);
    for (size_t i = 0; contributions.size() > 1 && i < contributions.size(); ++i) {
      if (!std::binary_search(contributions[i].begin(), contributions[i].end(), route.root)) {
        out.emplace_back(static_cast<int32_t>(i), static_cast<int32_t>(choice_.choose(contributions[i], route.root, num_bytes)));
      }
    }
    return out;
  }

  ReshardingPlan& plan_;
  const Strategy& strategy_;
  Network network_;
  Timeline timeline_;
  HolderChoice choice_;
  ReducerChoice reducers_;
  std::vector<int32_t> device_of_;  ///< by dense rank: how many participants of its host come before it
};

void planBroadcast(ReshardingPlan& plan, const Strategy& strategy) { BroadcastBuilder(plan, strategy).run(); }

}  // namespace

StrategyInfo broadcastStrategy() {
  return {"broadcast",
          "one sender per slice, a chunked chain over the receiving hosts, then over the devices of each",
          {{"senders", {"size", "naive"}}, {"order", {"best", "naive", "dfs", "greedy"}}},
          {{"seed", 0, 0}, {"node_budget", 20'000, 0}, {"num_chunks", 0, 0}, {"collective", 0, 0}},
          isAlwaysCandidate,
          planBroadcast};
}

}  // namespace xmesh::core
