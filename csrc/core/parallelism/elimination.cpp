#include "core/parallelism/elimination.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/parallelism/remainder.h"

namespace xmesh::core {
namespace {

/// The most cells of a table: about 100 MB.
constexpr size_t kMostCells = size_t{12} << 20;

/// The most cells of a table in a step of a descent.
constexpr size_t kDescentCells = size_t{1} << 13;

/// The most cells of all tables in all branches of an exact search: some seconds.
constexpr double kMostWork = 5e8;

/// Branches of a search, those included that end at once.
constexpr size_t kMostBranches = 4096;

constexpr size_t kMostRounds = 16;

/// Branch and bound over what degrees 0 to 2 leave.
class Search {
 public:
  /// Exact, unless there are too many branches.
  std::optional<ShardingChoices> run(Remainder remainder) {
    go(std::move(remainder));
    if (best_.has_value()) {
      best_->is_exact = num_branches_ < kMostBranches;
    }
    return best_;
  }

 private:
  void go(Remainder remainder) {
    if (num_branches_ == kMostBranches) {
      return;
    }
    ++num_branches_;
    remainder.reduce();
    const double known = best_.has_value() ? best_->cost : kForbidden;
    if (remainder.bound() >= known) {
      return;
    }
    if (remainder.isEmpty() || remainder.finishByBuckets(kMostCells)) {
      if (remainder.constant() < known) {
        best_ = ShardingChoices{remainder.choices(), remainder.constant()};
      }
      return;
    }
    const size_t node = remainder.toDecide(kMostCells).nodes.front();
    for (size_t choice = 0; choice < remainder.costsOf(node).size(); ++choice) {
      if (remainder.costsOf(node)[choice] < kForbidden) {
        Remainder decided = remainder;
        decided.decide(node, choice);
        go(std::move(decided));
      }
    }
  }

  std::optional<ShardingChoices> best_;
  size_t num_branches_ = 0;
};

/// A search for what branch and bound would take too long for: some nodes are given choices, without which tables are small; then one after another
/// of these chooses anew, exactly, beside the others' choices, until none gets better.
class Descent {
 public:
  explicit Descent(const Remainder& start) : start_(start), nodes_(start.toDecide(kDescentCells).nodes) {}

  std::optional<ShardingChoices> run() {
    if (!begin()) {
      return std::nullopt;
    }
    bool is_better = true;
    for (size_t round = 0; is_better && round < kMostRounds; ++round) {
      is_better = false;
      for (const size_t node : nodes_) {
        is_better = chooseAnew(node) || is_better;
      }
    }
    best_->is_exact = false;
    return best_;
  }

 private:
  /// The nodes choose in turn, each what is promising beside those before it; false where that leaves nothing.
  bool begin() {
    Remainder remainder = start_;
    for (const size_t node : nodes_) {
      given_[node] = remainder.promising(node);
      remainder.decide(node, given_[node]);
    }
    return take(std::move(remainder));
  }

  bool chooseAnew(size_t free) {
    Remainder remainder = start_;
    for (const auto& [node, choice] : given_) {
      if (node != free) {
        remainder.decide(node, choice);
      }
    }
    return take(std::move(remainder));
  }

  /// Whether the best of what is left is better than the best until now.
  bool take(Remainder remainder) {
    remainder.reduce();
    if (!remainder.isEmpty() && !remainder.finishByBuckets(kMostCells)) {
      return false;
    }
    if (remainder.constant() >= (best_.has_value() ? best_->cost : kForbidden)) {
      return false;
    }
    best_ = ShardingChoices{remainder.choices(), remainder.constant()};
    for (auto& [node, choice] : given_) {
      choice = best_->choice_of[node];
    }
    return true;
  }

  const Remainder& start_;
  const std::vector<size_t> nodes_;
  std::map<size_t, size_t> given_;
  std::optional<ShardingChoices> best_;
};

/// Whether branch and bound is done in some seconds.
bool isSearched(const Remainder& remainder) {
  const Remainder::ToDecide decided = remainder.toDecide(kMostCells);
  double branches = 1;
  for (const size_t node : decided.nodes) {
    branches *= static_cast<double>(remainder.numChoices(node));
  }
  return branches < kMostBranches && branches * decided.cells <= kMostWork;
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
  Remainder remainder(graph);
  remainder.reduce();
  if (!isSearched(remainder)) {
    remainder.forbidDominated();
    remainder.reduce();
    if (!isSearched(remainder)) {
      best = Descent(remainder).run();
    }
  }
  if (!best.has_value()) {
    best = Search().run(std::move(remainder));
  }
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
