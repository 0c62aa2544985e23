#include "core/resharding/host_load.h"

#include <algorithm>

namespace xmesh::core {
namespace {

__extension__ using Wide = __int128;

/// Dinic's maximum flow from the shared loads through their hosts. Nodes: source, shared loads, hosts, sink.
class LoadFlow {
 public:
  LoadFlow(const std::vector<SharedLoad>& shared_loads, const std::vector<int64_t>& rates, LoadRatio bound)
      : num_loads_(static_cast<int32_t>(shared_loads.size())),
        num_nodes_(num_loads_ + static_cast<int32_t>(rates.size()) + 2),
        arcs_of_(static_cast<size_t>(num_nodes_)) {
    for (size_t i = 0; i < shared_loads.size(); ++i) {
      const Wide supply = Wide{shared_loads[i].mass} * bound.rate;
      total_ += supply;
      addArc(source(), loadNode(i), supply);
      for (int32_t host : shared_loads[i].hosts) {
        addArc(loadNode(i), hostNode(host), supply);
      }
    }
    for (size_t host = 0; host < rates.size(); ++host) {
      addArc(hostNode(static_cast<int32_t>(host)), sink(), Wide{bound.mass} * rates[host]);
    }
  }

  /// True when all mass arrives.
  bool isFeasible() {
    Wide flow = 0;
    while (levelNodes()) {
      next_edge_.assign(static_cast<size_t>(num_nodes_), 0);
      flow += push(source(), total_);
    }
    return flow == total_;
  }

  /// After a flow that is not feasible: whether the host is on the source's side of the minimum cut.
  bool isCut(int32_t host) const { return level_[static_cast<size_t>(hostNode(host))] >= 0; }

  /// Flow from shared load i to the k-th of its hosts.
  Wide flowOf(size_t i, size_t k) const {
    const Arc& arc = arcs_[static_cast<size_t>(arcs_of_[static_cast<size_t>(loadNode(i))][k + 1])];
    return arcs_[static_cast<size_t>(arc.reverse)].capacity;
  }

 private:
  struct Arc {
    int32_t to = 0;
    int32_t reverse = 0;
    Wide capacity = 0;
  };

  static int32_t source() { return 0; }
  int32_t loadNode(size_t i) const { return 1 + static_cast<int32_t>(i); }
  int32_t hostNode(int32_t host) const { return 1 + num_loads_ + host; }
  int32_t sink() const { return num_nodes_ - 1; }

  void addArc(int32_t from, int32_t to, Wide capacity) {
    const auto index = static_cast<int32_t>(arcs_.size());
    arcs_.push_back({to, index + 1, capacity});
    arcs_.push_back({from, index, 0});
    arcs_of_[static_cast<size_t>(from)].push_back(index);
    arcs_of_[static_cast<size_t>(to)].push_back(index + 1);
  }

  bool levelNodes() {
    level_.assign(static_cast<size_t>(num_nodes_), -1);
    level_[0] = 0;
    std::vector<int32_t> queue = {source()};
    for (size_t head = 0; head < queue.size(); ++head) {
      for (int32_t index : arcs_of_[static_cast<size_t>(queue[head])]) {
        const Arc& arc = arcs_[static_cast<size_t>(index)];
        if (arc.capacity > 0 && level_[static_cast<size_t>(arc.to)] < 0) {
          level_[static_cast<size_t>(arc.to)] = level_[static_cast<size_t>(queue[head])] + 1;
          queue.push_back(arc.to);
        }
      }
    }
    return level_[static_cast<size_t>(sink())] >= 0;
  }

  Wide push(int32_t node, Wide limit) {
    if (node == sink()) {
      return limit;
    }
    Wide pushed = 0;
    const std::vector<int32_t>& arcs = arcs_of_[static_cast<size_t>(node)];
    for (size_t& i = next_edge_[static_cast<size_t>(node)]; i < arcs.size(); ++i) {
      Arc& arc = arcs_[static_cast<size_t>(arcs[i])];
      if (arc.capacity <= 0 || level_[static_cast<size_t>(arc.to)] != level_[static_cast<size_t>(node)] + 1) {
        continue;
      }
      const Wide flow = push(arc.to, std::min(limit - pushed, arc.capacity));
      arc.capacity -= flow;
      arcs_[static_cast<size_t>(arc.reverse)].capacity += flow;
      pushed += flow;
      if (pushed == limit) {
        return pushed;
      }
    }
    return pushed;
  }

  int32_t num_loads_;
  int32_t num_nodes_;
  Wide total_ = 0;
  std::vector<std::vector<int32_t>> arcs_of_;
  std::vector<Arc> arcs_;
  std::vector<int32_t> level_;
  std::vector<size_t> next_edge_;
};

bool isInside(const SharedLoad& shared, const std::vector<bool>& hosts) {
  return std::all_of(shared.hosts.begin(), shared.hosts.end(), [&](int32_t host) { return hosts[static_cast<size_t>(host)]; });
}

LoadRatio ratioOf(const std::vector<SharedLoad>& shared_loads, const std::vector<int64_t>& rates, const std::vector<bool>& hosts) {
  LoadRatio out{0, 0};
  for (const SharedLoad& shared : shared_loads) {
    out.mass += isInside(shared, hosts) ? shared.mass : 0;
  }
  for (size_t host = 0; host < rates.size(); ++host) {
    out.rate += hosts[host] ? rates[host] : 0;
  }
  return out;
}

bool isMore(LoadRatio a, LoadRatio b) { return Wide{a.mass} * b.rate > Wide{b.mass} * a.rate; }

}  // namespace

LoadRatio worstHostSet(const std::vector<SharedLoad>& shared_loads, const std::vector<int64_t>& rates, LoadRatio at_least) {
  std::vector<int64_t> alone(rates.size(), 0);
  for (const SharedLoad& shared : shared_loads) {
    if (shared.hosts.size() == 1) {
      alone[static_cast<size_t>(shared.hosts[0])] += shared.mass;
    }
  }
  LoadRatio best = at_least;
  for (size_t host = 0; host < rates.size(); ++host) {
    const LoadRatio ratio{alone[host], rates[host]};
    best = isMore(ratio, best) ? ratio : best;
  }
  while (true) {
    LoadFlow flow(shared_loads, rates, best);
    if (flow.isFeasible()) {
      return best;
    }
    std::vector<bool> cut(rates.size());
    for (size_t host = 0; host < rates.size(); ++host) {
      cut[host] = flow.isCut(static_cast<int32_t>(host));
    }
    best = ratioOf(shared_loads, rates, cut);
  }
}

std::vector<std::vector<int64_t>> splitWithin(const std::vector<SharedLoad>& shared_loads, const std::vector<int64_t>& rates, LoadRatio bound) {
  LoadFlow flow(shared_loads, rates, bound);
  flow.isFeasible();
  std::vector<std::vector<int64_t>> out;
  for (size_t i = 0; i < shared_loads.size(); ++i) {
    std::vector<int64_t>& bytes = out.emplace_back();
    int64_t left = shared_loads[i].mass;
    for (size_t k = 0; k < shared_loads[i].hosts.size(); ++k) {
      const auto share = static_cast<int64_t>(flow.flowOf(i, k) / bound.rate);
      bytes.push_back(std::min(share, left));
      left -= bytes.back();
    }
    for (size_t k = 0; left > 0 && k < bytes.size(); ++k) {  // rounding: at most one byte per host
      const int64_t more = bytes[k] > 0 || k + 1 == bytes.size() ? left : 0;
      bytes[k] += more;
      left -= more;
    }
  }
  return out;
}

}  // namespace xmesh::core
