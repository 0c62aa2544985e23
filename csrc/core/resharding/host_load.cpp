#include "core/resharding/host_load.h"

#include <algorithm>

namespace xmesh::core {
namespace {

__extension__ using Wide = __int128;

/// Dinic's maximum flow from the blocks through their hosts. Nodes: source, blocks, hosts, sink.
class BlockFlow {
 public:
  BlockFlow(const std::vector<MassBlock>& blocks, const std::vector<int64_t>& rates, LoadRatio bound)
      : num_blocks_(static_cast<int32_t>(blocks.size())),
        num_nodes_(num_blocks_ + static_cast<int32_t>(rates.size()) + 2),
        edges_of_(static_cast<size_t>(num_nodes_)) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      const Wide supply = Wide{blocks[i].mass} * bound.rate;
      total_ += supply;
      addEdge(source(), block(i), supply);
      for (int32_t host : blocks[i].hosts) {
        addEdge(block(i), hostNode(host), supply);
      }
    }
    for (size_t host = 0; host < rates.size(); ++host) {
      addEdge(hostNode(static_cast<int32_t>(host)), sink(), Wide{bound.mass} * rates[host]);
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

  /// Flow from block i to the k-th of its hosts.
  Wide flowOf(size_t i, size_t k) const {
    const Edge& edge = edges_[static_cast<size_t>(edges_of_[static_cast<size_t>(block(i))][k + 1])];
    return edges_[static_cast<size_t>(edge.reverse)].capacity;
  }

 private:
  struct Edge {
    int32_t to = 0;
    int32_t reverse = 0;
    Wide capacity = 0;
  };

  static int32_t source() { return 0; }
  int32_t block(size_t i) const { return 1 + static_cast<int32_t>(i); }
  int32_t hostNode(int32_t host) const { return 1 + num_blocks_ + host; }
  int32_t sink() const { return num_nodes_ - 1; }

  void addEdge(int32_t from, int32_t to, Wide capacity) {
    const auto index = static_cast<int32_t>(edges_.size());
    edges_.push_back({to, index + 1, capacity});
    edges_.push_back({from, index, 0});
    edges_of_[static_cast<size_t>(from)].push_back(index);
    edges_of_[static_cast<size_t>(to)].push_back(index + 1);
  }

  bool levelNodes() {
    level_.assign(static_cast<size_t>(num_nodes_), -1);
    level_[0] = 0;
    std::vector<int32_t> queue = {source()};
    for (size_t head = 0; head < queue.size(); ++head) {
      for (int32_t index : edges_of_[static_cast<size_t>(queue[head])]) {
        const Edge& edge = edges_[static_cast<size_t>(index)];
        if (edge.capacity > 0 && level_[static_cast<size_t>(edge.to)] < 0) {
          level_[static_cast<size_t>(edge.to)] = level_[static_cast<size_t>(queue[head])] + 1;
          queue.push_back(edge.to);
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
    const std::vector<int32_t>& edges = edges_of_[static_cast<size_t>(node)];
    for (size_t& i = next_edge_[static_cast<size_t>(node)]; i < edges.size(); ++i) {
      Edge& edge = edges_[static_cast<size_t>(edges[i])];
      if (edge.capacity <= 0 || level_[static_cast<size_t>(edge.to)] != level_[static_cast<size_t>(node)] + 1) {
        continue;
      }
      const Wide flow = push(edge.to, std::min(limit - pushed, edge.capacity));
      edge.capacity -= flow;
      edges_[static_cast<size_t>(edge.reverse)].capacity += flow;
      pushed += flow;
      if (pushed == limit) {
        return pushed;
      }
    }
    return pushed;
  }

  int32_t num_blocks_;
  int32_t num_nodes_;
  Wide total_ = 0;
  std::vector<std::vector<int32_t>> edges_of_;
  std::vector<Edge> edges_;
  std::vector<int32_t> level_;
  std::vector<size_t> next_edge_;
};

bool isInside(const MassBlock& block, const std::vector<bool>& hosts) {
  return std::all_of(block.hosts.begin(), block.hosts.end(), [&](int32_t host) { return hosts[static_cast<size_t>(host)]; });
}

LoadRatio ratioOf(const std::vector<MassBlock>& blocks, const std::vector<int64_t>& rates, const std::vector<bool>& hosts) {
  LoadRatio out{0, 0};
  for (const MassBlock& block : blocks) {
    out.mass += isInside(block, hosts) ? block.mass : 0;
  }
  for (size_t host = 0; host < rates.size(); ++host) {
    out.rate += hosts[host] ? rates[host] : 0;
  }
  return out;
}

bool isMore(LoadRatio a, LoadRatio b) { return Wide{a.mass} * b.rate > Wide{b.mass} * a.rate; }

}  // namespace

LoadRatio worstHostSet(const std::vector<MassBlock>& blocks, const std::vector<int64_t>& rates, LoadRatio at_least) {
  std::vector<int64_t> alone(rates.size(), 0);
  for (const MassBlock& block : blocks) {
    if (block.hosts.size() == 1) {
      alone[static_cast<size_t>(block.hosts[0])] += block.mass;
    }
  }
  LoadRatio best = at_least;
  for (size_t host = 0; host < rates.size(); ++host) {
    const LoadRatio ratio{alone[host], rates[host]};
    best = isMore(ratio, best) ? ratio : best;
  }
  while (true) {
    BlockFlow flow(blocks, rates, best);
    if (flow.isFeasible()) {
      return best;
    }
    std::vector<bool> cut(rates.size());
    for (size_t host = 0; host < rates.size(); ++host) {
      cut[host] = flow.isCut(static_cast<int32_t>(host));
    }
    best = ratioOf(blocks, rates, cut);
  }
}

std::vector<std::vector<int64_t>> splitWithin(const std::vector<MassBlock>& blocks, const std::vector<int64_t>& rates, LoadRatio bound) {
  BlockFlow flow(blocks, rates, bound);
  flow.isFeasible();
  std::vector<std::vector<int64_t>> out;
  for (size_t i = 0; i < blocks.size(); ++i) {
    std::vector<int64_t>& bytes = out.emplace_back();
    int64_t left = blocks[i].mass;
    for (size_t k = 0; k < blocks[i].hosts.size(); ++k) {
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
