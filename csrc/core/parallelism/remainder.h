#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "core/parallelism/bucket_elimination.h"
#include "core/parallelism/strategy_graph.h"

namespace xmesh::core {

/// A graph with one edge at most between two nodes, of which nodes go one by one. Copies share tables.
class Remainder {
 public:
  explicit Remainder(const StrategyGraph& graph);

  /// Eliminates what has two neighbors at most, but for `kept`.
  void reduce(const std::set<size_t>& kept = {});
  /// Gives a node one choice: it then has no neighbors.
  void decide(size_t node, size_t choice);
  /// Forbids what other choices of the same node dominate (undominatedChoices).
  void forbidDominated();
  /// Eliminates what is left, whatever its neighbors. False, and nothing happens, where a table would have more cells than `most_cells`.
  bool finishByBuckets(size_t most_cells);

  bool isEmpty() const { return left_.empty(); }
  size_t numLeft() const { return left_.size(); }
  const std::set<size_t>& left() const { return left_; }
  /// Which nodes have to be given a choice for finishByBuckets() to have tables of at most `most_cells`, and the cells of all its tables then.
  struct ToDecide {
    std::vector<size_t> nodes;  ///< those with most neighbors among the ones that have a choice; in this order
    double cells = 0;
  };
  ToDecide toDecide(size_t most_cells) const;
  /// How many choices of a node are not forbidden.
  size_t numChoices(size_t node) const;
  /// The one that costs least if each of its neighbors could choose for it alone.
  size_t promising(size_t node) const;

  const std::vector<double>& costsOf(size_t node) const { return costs_[node]; }
  /// Null where they are no neighbors.
  const SharedCostTable* tableBetween(size_t node, size_t neighbor) const;
  /// What the nodes that are gone cost together, whatever the others choose.
  double constant() const { return constant_; }
  /// No choice of what is left costs less than this, with the constant.
  double bound() const;
  /// The choices of all nodes, once all are gone.
  std::vector<size_t> choices() const;

 private:
  /// One that is gone, as it was: what it chooses follows from what its neighbors choose.
  struct Eliminated {
    size_t node = 0;
    std::vector<double> costs;
    std::vector<std::pair<size_t, SharedCostTable>> neighbors;  ///< rows are this node's choices
  };

  void add(size_t a, size_t b, const SharedCostTable& table, const SharedCostTable& transpose);
  void eliminate(size_t node);
  void takeInto(const Eliminated& gone);
  void join(const Eliminated& gone);
  /// What is left, by the places of its nodes in left().
  PairwiseCosts pairwise() const;

  std::vector<std::vector<double>> costs_;                 ///< by node; of those that are gone, empty
  std::vector<std::map<size_t, SharedCostTable>> tables_;  ///< by node and neighbor; rows are the node's choices
  std::set<size_t> left_;
  std::set<size_t> todo_;  ///< whose neighbors have changed
  std::vector<Eliminated> gone_;
  std::map<size_t, size_t> given_;  ///< choices of the nodes that finishByBuckets() took
  double constant_ = 0;
};

}  // namespace xmesh::core
