#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/parallelism/cost_table.h"

namespace xmesh::core {

/// An operator, or the value of one that several read, with what each of its sharding choices costs by itself.
struct StrategyNode {
  std::string name;
  std::vector<double> costs;  ///< by choice; kForbidden for what may not be chosen
};

/// A value on its way: what it costs to bring it from how one node leaves it to how the other takes it, forward and backward.
struct StrategyEdge {
  size_t from = 0;
  size_t to = 0;
  SharedCostTable costs;  ///< rows are choices of `from`
};

/// One choice for each node of a graph, and what all of them cost together.
struct ShardingChoices {
  std::vector<size_t> choice_of;
  double cost = 0;
  bool is_exact = true;  ///< nothing costs less
};

/// The sharding choices of a model on one mesh, and what they cost: the objective of L. Zheng et al., Alpa (OSDI 2022), eq. 1, whose least cost
/// leastCost() finds. Any number of edges may join two nodes.
class StrategyGraph {
 public:
  /// Its number: they count from zero. Throws InvalidArgument for a node without choices and for a cost that is no number.
  size_t addNode(std::string name, std::vector<double> costs);
  /// Throws InvalidArgument where the table does not fit both nodes, or where these are one.
  void addEdge(size_t from, size_t to, SharedCostTable costs);

  /// Other costs of all nodes, on end: edges stay. Throws InvalidArgument for another number of them, and for one that is no number.
  void setCosts(const double* costs, size_t count);

  const std::vector<StrategyNode>& nodes() const { return nodes_; }
  const std::vector<StrategyEdge>& edges() const { return edges_; }
  size_t numChoices(size_t node) const { return nodes_.at(node).costs.size(); }
  /// What one choice per node costs. Throws InvalidArgument for another number of choices, and for one that a node does not have.
  double cost(const std::vector<size_t>& choice_of) const;
  /// The part of each edge in it.
  std::vector<double> edgeCosts(const std::vector<size_t>& choice_of) const;

 private:
  void requireChoices(const std::vector<size_t>& choice_of) const;

  std::vector<StrategyNode> nodes_;
  std::vector<StrategyEdge> edges_;
};

}  // namespace xmesh::core
