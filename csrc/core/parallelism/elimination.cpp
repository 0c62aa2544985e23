#include "core/parallelism/elimination.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/parallelism/bucket_elimination.h"

namespace xmesh::core {
namespace {

/// Of a table, in all: about 100 MB.
constexpr size_t kMostCells = size_t{12} << 20;

/// One that is gone, as it was: what it chooses follows from what its neighbors choose.
struct Eliminated {
  size_t node = 0;
  std::vector<double> costs;
  std::vector<std::pair<size_t, SharedCostTable>> neighbors;  ///< rows are this node's choices
};

SharedCostTable transposed(const CostTable& table) {
  auto out = std::make_shared<CostTable>(CostTable{table.num_columns, table.num_rows, std::vector<double>(table.costs.size())});
  for (size_t row = 0; row < table.num_rows; ++row) {
    for (size_t column = 0; column < table.num_columns; ++column) {
      out->costs[column * table.num_rows + row] = table.at(row, column);
    }
  }
  return out;
}

/// Transposes of the tables that edges share, each made once.
class Transposes {
 public:
  SharedCostTable of(const SharedCostTable& table) {
    auto& [kept, out] = made_[table.get()];
    if (out == nullptr) {
      kept = table;
      out = transposed(*table);
    }
    return out;
  }

 private:
  std::map<const CostTable*, std::pair<SharedCostTable, SharedCostTable>> made_;
};

/// A graph with one edge at most between two nodes, of which nodes go one by one.
class Remainder {
 public:
  explicit Remainder(const StrategyGraph& graph) {
    Transposes transposes;
    for (const StrategyNode& node : graph.nodes()) {
      costs_.push_back(node.costs);
    }
    tables_.resize(costs_.size());
    for (const StrategyEdge& edge : graph.edges()) {
      add(edge.from, edge.to, edge.costs, transposes.of(edge.costs));
    }
    for (size_t node = 0; node < costs_.size(); ++node) {
      left_.insert(node);
      todo_.insert(node);
    }
  }

  /// Eliminates what has two neighbors at most, but for `kept`.
  void reduce(const std::set<size_t>& kept = {}) {
    while (!todo_.empty()) {
      const size_t node = *todo_.begin();
      todo_.erase(todo_.begin());
      if (!left_.contains(node) || kept.contains(node) || tables_[node].size() > 2) {
        continue;
      }
      eliminate(node);
    }
  }

  /// Gives a node one choice: it then has no neighbors.
  void decide(size_t node, size_t choice) {
    const std::map<size_t, SharedCostTable> neighbors = std::move(tables_[node]);
    tables_[node].clear();
    for (const auto& [neighbor, table] : neighbors) {
      for (size_t column = 0; column < table->num_columns; ++column) {
        costs_[neighbor][column] += table->at(choice, column);
      }
      tables_[neighbor].erase(node);
      todo_.insert(neighbor);
    }
    for (size_t other = 0; other < costs_[node].size(); ++other) {
      if (other != choice) {
        costs_[node][other] = kForbidden;
      }
    }
    todo_.insert(node);
  }

  bool isEmpty() const { return left_.empty(); }
  /// Eliminates what is left, whatever its neighbors; false, and nothing happens, where that takes too large tables.
  bool finishByBuckets() {
    const std::vector<size_t> nodes(left_.begin(), left_.end());
    std::map<size_t, size_t> place_of;
    PairwiseCosts rest;
    for (const size_t node : nodes) {
      place_of[node] = rest.costs.size();
      rest.costs.push_back(costs_[node]);
    }
    for (const size_t node : nodes) {
      for (auto edge = tables_[node].upper_bound(node); edge != tables_[node].end(); ++edge) {
        rest.edges.push_back({place_of[node], place_of[edge->first], edge->second});
      }
    }
    const auto found = leastByBuckets(rest, kMostCells);
    if (!found.has_value()) {
      return false;
    }
    for (size_t place = 0; place < nodes.size(); ++place) {
      given_[nodes[place]] = found->first[place];
    }
    constant_ += found->second;
    left_.clear();
    return true;
  }
  /// The node that has most neighbors, the first of several.
  size_t widest() const {
    return *std::max_element(left_.begin(), left_.end(), [this](size_t a, size_t b) { return tables_[a].size() < tables_[b].size(); });
  }
  const std::vector<double>& costsOf(size_t node) const { return costs_[node]; }
  const SharedCostTable* tableBetween(size_t node, size_t neighbor) const {
    const auto found = tables_[node].find(neighbor);
    return found == tables_[node].end() ? nullptr : &found->second;
  }
  size_t numLeft() const { return left_.size(); }
  /// Of what is gone.
  double constant() const { return constant_; }
  /// No choice of what is left costs less than this and the constant.
  double bound() const {
    double out = constant_;
    for (const size_t node : left_) {
      out += *std::min_element(costs_[node].begin(), costs_[node].end());
      for (auto edge = tables_[node].upper_bound(node); edge != tables_[node].end(); ++edge) {
        out += *std::min_element(edge->second->costs.begin(), edge->second->costs.end());
      }
    }
    return out;
  }

  /// The choices of all nodes, once all are gone.
  std::vector<size_t> choices() const {
    std::vector<size_t> out(costs_.size());
    for (const auto& [node, choice] : given_) {
      out[node] = choice;
    }
    for (auto gone = gone_.rbegin(); gone != gone_.rend(); ++gone) {
      out[gone->node] = best(*gone, [&](size_t choice) {
        double cost = gone->costs[choice];
        for (const auto& [neighbor, table] : gone->neighbors) {
          cost += table->at(choice, out[neighbor]);
        }
        return cost;
      });
    }
    return out;
  }

 private:
  template <typename Cost>
  static size_t best(const Eliminated& node, Cost cost) {
    size_t out = 0;
    double least = cost(0);
    for (size_t choice = 1; choice < node.costs.size(); ++choice) {
      if (const double found = cost(choice); found < least) {
        least = found;
        out = choice;
      }
    }
    return out;
  }

  void add(size_t a, size_t b, const SharedCostTable& table, const SharedCostTable& transpose) {
    const auto sum = [](SharedCostTable& slot, const SharedCostTable& more) {
      if (slot == nullptr) {
        slot = more;
        return;
      }
      auto out = std::make_shared<CostTable>(*slot);
      for (size_t i = 0; i < out->costs.size(); ++i) {
        out->costs[i] += more->costs[i];
      }
      slot = std::move(out);
    };
    sum(tables_[a][b], table);
    sum(tables_[b][a], transpose);
  }

  void eliminate(size_t node) {
    Eliminated gone{node, std::move(costs_[node]), {tables_[node].begin(), tables_[node].end()}};
    for (const auto& [neighbor, table] : gone.neighbors) {
      tables_[neighbor].erase(node);
      todo_.insert(neighbor);
    }
    tables_[node].clear();
    left_.erase(node);
    if (gone.neighbors.empty()) {
      constant_ += *std::min_element(gone.costs.begin(), gone.costs.end());
    } else if (gone.neighbors.size() == 1) {
      takeInto(gone);
    } else {
      join(gone);
    }
    gone_.push_back(std::move(gone));
  }

  /// The neighbor's choices cost what the node's cheapest beside each costs, too.
  void takeInto(const Eliminated& gone) {
    const auto& [neighbor, table] = gone.neighbors.front();
    for (size_t column = 0; column < table->num_columns; ++column) {
      double least = kForbidden;
      for (size_t row = 0; row < table->num_rows; ++row) {
        least = std::min(least, gone.costs[row] + table->at(row, column));
      }
      costs_[neighbor][column] += least;
    }
  }

  void join(const Eliminated& gone) {
    const auto& [first, to_first] = gone.neighbors.front();
    const auto& [second, to_second] = gone.neighbors.back();
    CostTable from_first = *transposed(*to_first);
    for (size_t row = 0; row < from_first.num_rows; ++row) {
      for (size_t column = 0; column < from_first.num_columns; ++column) {
        from_first.costs[row * from_first.num_columns + column] += gone.costs[column];
      }
    }
    const auto table = std::make_shared<const CostTable>(minPlusProduct(from_first, *to_second));
    add(first, second, table, transposed(*table));
  }

  std::vector<std::vector<double>> costs_;                 ///< by node; of those that are gone, empty
  std::vector<std::map<size_t, SharedCostTable>> tables_;  ///< by node and neighbor; rows are the node's choices
  std::set<size_t> left_;
  std::set<size_t> todo_;  ///< whose neighbors have changed
  std::vector<Eliminated> gone_;
  std::map<size_t, size_t> given_;  ///< choices of the nodes that finishByBuckets() took
  double constant_ = 0;
};

/// Branch and bound over what degrees 0 to 2 leave.
void search(Remainder remainder, std::optional<ShardingChoices>& best) {
  remainder.reduce();
  if (remainder.bound() >= (best.has_value() ? best->cost : kForbidden)) {
    return;
  }
  if (!remainder.isEmpty() && remainder.finishByBuckets() && remainder.constant() >= (best.has_value() ? best->cost : kForbidden)) {
    return;
  }
  if (remainder.isEmpty()) {
    best = ShardingChoices{remainder.choices(), remainder.constant()};
    return;
  }
  const size_t node = remainder.widest();
  for (size_t choice = 0; choice < remainder.costsOf(node).size(); ++choice) {
    if (remainder.costsOf(node)[choice] < kForbidden) {
      Remainder decided = remainder;
      decided.decide(node, choice);
      search(std::move(decided), best);
    }
  }
}

/// A node that cannot be served: the first without which something could be chosen.
std::string culpritOf(const StrategyGraph& graph) {
  for (const StrategyNode& node : graph.nodes()) {
    if (std::all_of(node.costs.begin(), node.costs.end(), [](double cost) { return cost == kForbidden; })) {
      return "node " + node.name + " may not take any of its " + std::to_string(node.costs.size()) + " choices";
    }
  }
  for (const StrategyEdge& edge : graph.edges()) {
    const CostTable& table = *edge.costs;
    if (std::all_of(table.costs.begin(), table.costs.end(), [](double cost) { return cost == kForbidden; })) {
      return "no choice of node " + graph.nodes()[edge.from].name + " goes with one of node " + graph.nodes()[edge.to].name;
    }
  }
  return "whatever is chosen, something that may not be is among it";
}

}  // namespace

ShardingChoices leastCost(const StrategyGraph& graph) {
  std::optional<ShardingChoices> best;
  search(Remainder(graph), best);
  if (!best.has_value()) {
    throw InvalidArgument("these sharding choices leave nothing: " + culpritOf(graph));
  }
  best->cost = graph.cost(best->choice_of);  // in the graph's own order of additions
  return *best;
}

CostTable costBetween(const StrategyGraph& graph, size_t first, size_t second) {
  require(first < graph.nodes().size() && second < graph.nodes().size() && first != second, "a table is between two nodes of a graph");
  StrategyGraph inner;
  for (size_t node = 0; node < graph.nodes().size(); ++node) {
    const bool is_end = node == first || node == second;
    inner.addNode(graph.nodes()[node].name, is_end ? std::vector<double>(graph.numChoices(node), 0) : graph.nodes()[node].costs);
  }
  for (const StrategyEdge& edge : graph.edges()) {
    inner.addEdge(edge.from, edge.to, edge.costs);
  }
  Remainder remainder(inner);
  remainder.reduce({first, second});
  require(remainder.numLeft() == 2, "between nodes " + graph.nodes()[first].name + " and " + graph.nodes()[second].name + " " +
                                        std::to_string(remainder.numLeft() - 2) + " nodes are left that have more than two neighbors each");
  const std::vector<double>& rows = remainder.costsOf(first);
  const std::vector<double>& columns = remainder.costsOf(second);
  const SharedCostTable* table = remainder.tableBetween(first, second);
  CostTable out{rows.size(), columns.size(), std::vector<double>(rows.size() * columns.size())};
  for (size_t row = 0; row < rows.size(); ++row) {
    for (size_t column = 0; column < columns.size(); ++column) {
      out.costs[row * columns.size() + column] =
          remainder.constant() + rows[row] + columns[column] + (table == nullptr ? 0 : (*table)->at(row, column));
    }
  }
  return out;
}

}  // namespace xmesh::core
