#include "core/parallelism/dominated_choices.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace xmesh::core {
namespace {

class Choices {
 public:
  explicit Choices(const PairwiseCosts& problem) : problem_(problem), edges_(problem.costs.size()), left_(problem.costs.size()) {
    for (size_t edge = 0; edge < problem.edges.size(); ++edge) {
      edges_[problem.edges[edge].from].push_back(edge);
      edges_[problem.edges[edge].to].push_back(edge);
    }
    for (size_t node = 0; node < left_.size(); ++node) {
      for (size_t choice = 0; choice < problem.costs[node].size(); ++choice) {
        if (problem.costs[node][choice] < kForbidden) {
          left_[node].push_back(choice);
        }
      }
    }
  }

  std::vector<std::vector<size_t>> undominated() {
    std::vector<bool> is_due(left_.size(), true);
    bool is_done = false;
    while (!is_done) {
      is_done = true;
      for (size_t node = 0; node < left_.size(); ++node) {
        if (!is_due[node]) {
          continue;
        }
        is_due[node] = false;
        if (prune(node)) {
          is_done = false;
          for (const size_t edge : edges_[node]) {  // with fewer choices here, more of theirs may be dominated
            is_due[problem_.edges[edge].from] = true;
            is_due[problem_.edges[edge].to] = true;
          }
        }
      }
    }
    return std::move(left_);
  }

 private:
  /// Whether choices of a node went.
  bool prune(size_t node) {
    const size_t before = left_[node].size();
    for (size_t place = 0; place < left_[node].size();) {
      const size_t choice = left_[node][place];
      const bool is_dominated =
          std::any_of(left_[node].begin(), left_[node].end(), [&](size_t other) { return other != choice && replaces(node, other, choice); });
      if (is_dominated) {
        left_[node].erase(left_[node].begin() + static_cast<std::ptrdiff_t>(place));
      } else {
        ++place;
      }
    }
    return left_[node].size() < before;
  }

  /// Whether `other` costs no more than `choice`, whatever the neighbors choose.
  bool replaces(size_t node, size_t other, size_t choice) const {
    double more = problem_.costs[node][other] - problem_.costs[node][choice];
    for (const size_t edge : edges_[node]) {
      const auto [is_reachable, most] = mostMore(problem_.edges[edge], node, other, choice);
      if (!is_reachable) {
        return true;  // beside no choice of that neighbor may `choice` be
      }
      more += most;
    }
    return more < 0 || (more == 0 && other < choice);
  }

  /// By how much `other` costs more than `choice` along an edge, at most; and whether `choice` can be at all.
  std::pair<bool, double> mostMore(const PairwiseCosts::Edge& edge, size_t node, size_t other, size_t choice) const {
    const bool is_from = edge.from == node;
    double most = -kForbidden;
    bool is_reachable = false;
    for (const size_t beside : left_[is_from ? edge.to : edge.from]) {
      const double costs = is_from ? edge.table->at(choice, beside) : edge.table->at(beside, choice);
      if (costs < kForbidden) {
        is_reachable = true;
        most = std::max(most, (is_from ? edge.table->at(other, beside) : edge.table->at(beside, other)) - costs);
      }
    }
    return {is_reachable, most};
  }

  const PairwiseCosts& problem_;
  std::vector<std::vector<size_t>> edges_;  ///< by node
  std::vector<std::vector<size_t>> left_;
};

}  // namespace

std::vector<std::vector<size_t>> undominatedChoices(const PairwiseCosts& problem) { return Choices(problem).undominated(); }

PairwiseCosts restricted(const PairwiseCosts& problem, const std::vector<std::vector<size_t>>& choices) {
  PairwiseCosts out;
  for (size_t node = 0; node < choices.size(); ++node) {
    out.costs.emplace_back();
    for (const size_t choice : choices[node]) {
      out.costs.back().push_back(problem.costs[node][choice]);
    }
  }
  for (const PairwiseCosts::Edge& edge : problem.edges) {
    auto table = std::make_shared<CostTable>(CostTable{choices[edge.from].size(), choices[edge.to].size(), {}});
    for (const size_t row : choices[edge.from]) {
      for (const size_t column : choices[edge.to]) {
        table->costs.push_back(edge.table->at(row, column));
      }
    }
    out.edges.push_back({edge.from, edge.to, std::move(table)});
  }
  return out;
}

}  // namespace xmesh::core
