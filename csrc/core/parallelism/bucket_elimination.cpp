#include "core/parallelism/bucket_elimination.h"

#include <algorithm>
#include <limits>
#include <set>

namespace xmesh::core {
namespace {

/// A cost for each choice of some nodes together; the last node's choices are next to each other.
struct Factor {
  std::vector<size_t> nodes;  ///< ascending
  std::vector<double> costs;
};

/// In which order nodes go: the next one is that with the fewest choices, together with its neighbors.
class Order {
 public:
  explicit Order(BucketSizes sizes) : sizes_(std::move(sizes)) {
    for (size_t node = 0; node < sizes_.num_choices.size(); ++node) {
      left_.insert(node);
    }
  }

  bool isDone() const { return left_.empty(); }
  size_t next() const {
    return *std::min_element(left_.begin(), left_.end(), [this](size_t a, size_t b) { return numCells(a) < numCells(b); });
  }
  const std::set<size_t>& around(size_t node) const { return sizes_.neighbors[node]; }

  /// The cells of the table over a node and its neighbors.
  size_t numCells(size_t node) const {
    auto out = static_cast<double>(sizes_.num_choices[node]);
    for (const size_t neighbor : sizes_.neighbors[node]) {
      out *= static_cast<double>(sizes_.num_choices[neighbor]);
    }
    return out < 1e18 ? static_cast<size_t>(out) : std::numeric_limits<size_t>::max();
  }

  /// Its neighbors become each other's.
  void eliminate(size_t node) {
    const std::set<size_t> around = std::move(sizes_.neighbors[node]);
    sizes_.neighbors[node].clear();
    left_.erase(node);
    for (const size_t one : around) {
      sizes_.neighbors[one].insert(around.begin(), around.end());
      sizes_.neighbors[one].erase(one);
      sizes_.neighbors[one].erase(node);
    }
  }

 private:
  BucketSizes sizes_;
  std::set<size_t> left_;
};

BucketSizes sizesOf(const PairwiseCosts& problem) {
  BucketSizes out;
  for (const std::vector<double>& costs : problem.costs) {
    out.num_choices.push_back(costs.size());
  }
  out.neighbors.resize(problem.costs.size());
  for (const PairwiseCosts::Edge& edge : problem.edges) {
    out.neighbors[edge.from].insert(edge.to);
    out.neighbors[edge.to].insert(edge.from);
  }
  return out;
}

class Buckets {
 public:
  explicit Buckets(const PairwiseCosts& problem) : order_(sizesOf(problem)) {
    for (const std::vector<double>& costs : problem.costs) {
      factors_.push_back({{sizes_.size()}, costs});
      sizes_.push_back(costs.size());
    }
    for (const PairwiseCosts::Edge& edge : problem.edges) {
      Factor factor{{std::min(edge.from, edge.to), std::max(edge.from, edge.to)}, {}};
      for (size_t first = 0; first < sizes_[factor.nodes[0]]; ++first) {
        for (size_t second = 0; second < sizes_[factor.nodes[1]]; ++second) {
          factor.costs.push_back(edge.from < edge.to ? edge.table->at(first, second) : edge.table->at(second, first));
        }
      }
      factors_.push_back(std::move(factor));
    }
  }

  void run() {
    while (!order_.isDone()) {
      eliminate(order_.next());
    }
  }

  std::pair<std::vector<size_t>, double> choices() const {
    std::vector<size_t> out(sizes_.size());
    for (auto gone = gone_.rbegin(); gone != gone_.rend(); ++gone) {
      size_t at = 0;
      for (const size_t node : gone->neighbors) {
        at = at * sizes_[node] + out[node];
      }
      out[gone->node] = gone->best[at];
    }
    return {out, constant_};
  }

 private:
  struct Gone {
    size_t node = 0;
    std::vector<size_t> neighbors;  ///< ascending
    std::vector<uint32_t> best;     ///< its choice, by the neighbors'
  };

  void eliminate(size_t node) {
    const std::vector<size_t> around(order_.around(node).begin(), order_.around(node).end());
    const Factor all = summed(node, around);
    Gone gone{node, around, {}};
    Factor left{around, {}};
    for (size_t begin = 0; begin < all.costs.size(); begin += sizes_[node]) {
      const auto first = all.costs.begin() + static_cast<std::ptrdiff_t>(begin);
      const auto least = std::min_element(first, first + static_cast<std::ptrdiff_t>(sizes_[node]));
      gone.best.push_back(static_cast<uint32_t>(least - first));
      left.costs.push_back(*least);
    }
    order_.eliminate(node);
    if (around.empty()) {
      constant_ += left.costs.front();
    } else {
      factors_.push_back(std::move(left));
    }
    gone_.push_back(std::move(gone));
  }

  /// All factors that have the node, added up: over its neighbors, and the node as the last.
  Factor summed(size_t node, const std::vector<size_t>& around) {
    Factor out{around, {}};
    out.nodes.push_back(node);
    size_t count = 1;
    for (const size_t one : out.nodes) {
      count *= sizes_[one];
    }
    out.costs.assign(count, 0);
    std::vector<Factor> rest;
    for (Factor& factor : factors_) {
      if (std::find(factor.nodes.begin(), factor.nodes.end(), node) == factor.nodes.end()) {
        rest.push_back(std::move(factor));
        continue;
      }
      add(out, factor);
    }
    factors_ = std::move(rest);
    return out;
  }

  /// Adds a factor over some of the sum's nodes.
  void add(Factor& sum, const Factor& factor) const {
    std::vector<size_t> strides(sum.nodes.size(), 0);  // the factor's strides along the sum's nodes
    size_t stride = 1;
    for (size_t place = factor.nodes.size(); place-- > 0;) {
      const auto found = std::find(sum.nodes.begin(), sum.nodes.end(), factor.nodes[place]);
      strides[static_cast<size_t>(found - sum.nodes.begin())] = stride;
      stride *= sizes_[factor.nodes[place]];
    }
    std::vector<size_t> at(sum.nodes.size(), 0);
    size_t place = 0;
    for (double& cost : sum.costs) {
      cost += factor.costs[place];
      for (size_t dim = sum.nodes.size(); dim-- > 0;) {
        place += strides[dim];
        if (++at[dim] < sizes_[sum.nodes[dim]]) {
          break;
        }
        place -= strides[dim] * at[dim];
        at[dim] = 0;
      }
    }
  }

  Order order_;
  std::vector<size_t> sizes_;  ///< numbers of choices
  std::vector<Factor> factors_;
  std::vector<Gone> gone_;
  double constant_ = 0;
};

}  // namespace

BucketCells bucketCells(BucketSizes sizes) {
  BucketCells out;
  Order order(std::move(sizes));
  while (!order.isDone()) {
    const size_t node = order.next();
    const auto cells = static_cast<double>(order.numCells(node));
    out.most = std::max(out.most, cells);
    out.sum += cells;
    order.eliminate(node);
  }
  return out;
}

std::optional<std::pair<std::vector<size_t>, double>> leastByBuckets(const PairwiseCosts& problem, size_t most_cells) {
  if (bucketCells(sizesOf(problem)).most > static_cast<double>(most_cells)) {
    return std::nullopt;
  }
  Buckets buckets(problem);
  buckets.run();
  return buckets.choices();
}

}  // namespace xmesh::core
