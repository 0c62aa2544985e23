#include "core/parallelism/strategy_graph.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"

namespace xmesh::core {
namespace {

void requireCosts(const std::vector<double>& costs, const std::string& what) {
  require(std::none_of(costs.begin(), costs.end(), [](double cost) { return std::isnan(cost) || cost == -kForbidden; }),
          what + " has a cost that is no number");
}

}  // namespace

size_t StrategyGraph::addNode(std::string name, std::vector<double> costs) {
  require(!costs.empty(), "node " + name + " has no choice");
  requireCosts(costs, "node " + name);
  nodes_.push_back({std::move(name), std::move(costs)});
  return nodes_.size() - 1;
}

void StrategyGraph::addEdge(size_t from, size_t to, SharedCostTable costs) {
  require(from < nodes_.size() && to < nodes_.size() && from != to,
          "an edge joins two of the " + std::to_string(nodes_.size()) + " nodes, got " + std::to_string(from) + " and " + std::to_string(to));
  const std::string what = "the edge from " + nodes_[from].name + " to " + nodes_[to].name;
  require(costs != nullptr && costs->num_rows == numChoices(from) && costs->num_columns == numChoices(to) &&
              costs->costs.size() == costs->num_rows * costs->num_columns,
          what + " has a table of " + std::to_string(numChoices(from)) + " x " + std::to_string(numChoices(to)) + " costs");
  requireCosts(costs->costs, what);
  edges_.push_back({from, to, std::move(costs)});
}

void StrategyGraph::setCosts(const double* costs, size_t count) {
  size_t num_choices = 0;
  for (const StrategyNode& node : nodes_) {
    num_choices += node.costs.size();
  }
  require(count == num_choices, "the nodes have " + std::to_string(num_choices) + " choices, got " + std::to_string(count) + " costs");
  for (StrategyNode& node : nodes_) {
    std::copy_n(costs, node.costs.size(), node.costs.begin());
    costs += node.costs.size();
    requireCosts(node.costs, "node " + node.name);
  }
}

void StrategyGraph::requireChoices(const std::vector<size_t>& choice_of) const {
  require(choice_of.size() == nodes_.size(),
          "expected a choice for each of " + std::to_string(nodes_.size()) + " nodes, got " + std::to_string(choice_of.size()));
  for (size_t node = 0; node < nodes_.size(); ++node) {
    require(choice_of[node] < numChoices(node),
            "node " + nodes_[node].name + " has " + std::to_string(numChoices(node)) + " choices, got number " + std::to_string(choice_of[node]));
  }
}

double StrategyGraph::cost(const std::vector<size_t>& choice_of) const {
  requireChoices(choice_of);
  double out = 0;
  for (size_t node = 0; node < nodes_.size(); ++node) {
    out += nodes_[node].costs[choice_of[node]];
  }
  for (const StrategyEdge& edge : edges_) {
    out += edge.costs->at(choice_of[edge.from], choice_of[edge.to]);
  }
  return out;
}

std::vector<double> StrategyGraph::edgeCosts(const std::vector<size_t>& choice_of) const {
  requireChoices(choice_of);
  std::vector<double> out;
  out.reserve(edges_.size());
  for (const StrategyEdge& edge : edges_) {
    out.push_back(edge.costs->at(choice_of[edge.from], choice_of[edge.to]));
  }
  return out;
}

}  // namespace xmesh::core
