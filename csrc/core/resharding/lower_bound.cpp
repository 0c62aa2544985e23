#include "core/resharding/lower_bound.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "core/resharding/host_load.h"
#include "core/resharding/host_sets.h"

namespace xmesh::core {
namespace {

using Hosts = std::vector<int32_t>;

bool isInside(const Hosts& inner, const Hosts& outer) { return std::includes(outer.begin(), outer.end(), inner.begin(), inner.end()); }

bool areDisjoint(const Hosts& a, const Hosts& b) {
  return std::none_of(a.begin(), a.end(), [&](int32_t host) { return std::binary_search(b.begin(), b.end(), host); });
}

/// Holder sets of which each must send the slice once: disjoint, the smallest first, none that holds all needing hosts.
std::vector<Hosts> sendingSets(std::vector<Hosts> contributions, const Hosts& needers) {
  std::stable_sort(contributions.begin(), contributions.end(), [](const Hosts& a, const Hosts& b) { return a.size() < b.size(); });
  std::vector<Hosts> out;
  for (const Hosts& holders : contributions) {
    if (!isInside(needers, holders) && std::all_of(out.begin(), out.end(), [&](const Hosts& other) { return areDisjoint(holders, other); })) {
      out.push_back(holders);
    }
  }
  return out;
}

/// Slices with the same holding and the same needing hosts.
struct LoadClass {
  int64_t holders = 0;  ///< a row of the plan's tables
  int64_t needers = 0;
  int64_t num_bytes = 0;
};

struct Demands {
  std::vector<int64_t> incoming;  ///< bytes by host
  std::vector<SharedLoad> outgoing;
};

Demands demandsOf(const ReshardingPlan& plan, const Network& network) {
  const HostSets hosts(plan, network);
  PairIndex class_of(hosts.num_holder_ids, hosts.num_needer_ids);
  std::vector<LoadClass> classes;
  for (const UnitTask& task : plan.tasks) {
    const auto [index, is_new] =
        class_of.idOf(hosts.holder_ids[static_cast<size_t>(task.holders)], hosts.needer_ids[static_cast<size_t>(task.needers)]);
    if (is_new) {
      classes.push_back({task.holders, task.needers, 0});
    }
    classes[static_cast<size_t>(index)].num_bytes += numElements(task.box) * plan.itemBytes(task);
  }
  Demands out;
  out.incoming.resize(static_cast<size_t>(network.numHosts()));
  std::vector<int64_t> mass_of_row(hosts.holders.size(), 0);  // bytes of slices with one contribution
  std::map<Hosts, int64_t> mass_of_senders;
  for (const auto& [holders, needers_row, mass] : classes) {
    const std::vector<Hosts>& contributions = hosts.holders[static_cast<size_t>(holders)];
    const Hosts& needers = hosts.needers[static_cast<size_t>(needers_row)];
    bool is_sent = false;
    for (int32_t host : needers) {
      const bool has_all =
          std::all_of(contributions.begin(), contributions.end(), [&](const Hosts& row) { return std::binary_search(row.begin(), row.end(), host); });
      out.incoming[static_cast<size_t>(host)] += has_all ? 0 : mass;
      is_sent = is_sent || !has_all;
    }
    if (contributions.size() == 1) {
      mass_of_row[static_cast<size_t>(holders)] += is_sent ? mass : 0;
      continue;
    }
    for (const Hosts& senders : sendingSets(contributions, needers)) {
      mass_of_senders[senders] += mass;
    }
  }
  for (size_t row = 0; row < mass_of_row.size(); ++row) {
    if (mass_of_row[row] > 0) {
      mass_of_senders[hosts.holders[row].front()] += mass_of_row[row];
    }
  }
  for (auto& [senders, mass] : mass_of_senders) {
    out.outgoing.push_back({senders, mass});
  }
  return out;
}

LoadRatio worstLoad(const Demands& demands, const std::vector<int64_t>& rates) {
  LoadRatio in{0, 1};
  for (size_t host = 0; host < rates.size(); ++host) {
    const LoadRatio here{demands.incoming[host], rates[host]};
    in = here.seconds() > in.seconds() ? here : in;
  }
  return worstHostSet(demands.outgoing, rates, in);
}

}  // namespace

LowerBound lowerBound(const ReshardingPlan& plan, const Network& network) {
  const Demands demands = demandsOf(plan, network);
  std::vector<int64_t> rates;
  for (int32_t host = 0; host < network.numHosts(); ++host) {
    rates.push_back(network.nicBytesPerS(host));
  }
  const LoadRatio in_bytes = worstLoad(demands, std::vector<int64_t>(rates.size(), 1));
  LowerBound out;
  out.bytes = (in_bytes.mass + in_bytes.rate - 1) / in_bytes.rate;
  const bool is_uniform = std::all_of(rates.begin(), rates.end(), [&](int64_t rate) { return rate == rates.front(); });
  out.seconds = is_uniform && !rates.empty()
                    ? static_cast<double>(in_bytes.mass) / static_cast<double>(in_bytes.rate) / static_cast<double>(rates.front())
                    : worstLoad(demands, rates).seconds();
  return out;
}

}  // namespace xmesh::core
