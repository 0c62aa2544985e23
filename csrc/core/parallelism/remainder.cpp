#include "core/parallelism/remainder.h"

#include <algorithm>
#include <memory>
#include <optional>

#include "core/parallelism/dominated_choices.h"

namespace xmesh::core {
namespace {

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

template <typename Cost>
size_t cheapest(size_t num_choices, Cost cost) {
  size_t out = 0;
  double least = cost(0);
  for (size_t choice = 1; choice < num_choices; ++choice) {
    if (const double found = cost(choice); found < least) {
      least = found;
      out = choice;
    }
  }
  return out;
}

}  // namespace

Remainder::Remainder(const StrategyGraph& graph) {
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

void Remainder::reduce(const std::set<size_t>& kept) {
  while (!todo_.empty()) {
    const size_t node = *todo_.begin();
    todo_.erase(todo_.begin());
    if (left_.contains(node) && !kept.contains(node) && tables_[node].size() <= 2) {
      eliminate(node);
    }
  }
}

void Remainder::decide(size_t node, size_t choice) {
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

void Remainder::forbidDominated() {
  const std::vector<std::vector<size_t>> choices = undominatedChoices(pairwise());
  size_t place = 0;
  for (const size_t node : left_) {
    const std::vector<size_t>& kept = choices[place++];
    for (size_t choice = 0; choice < costs_[node].size(); ++choice) {
      if (!std::binary_search(kept.begin(), kept.end(), choice)) {
        costs_[node][choice] = kForbidden;
      }
    }
  }
}

bool Remainder::finishByBuckets(size_t most_cells) {
  const PairwiseCosts rest = pairwise();
  std::vector<std::vector<size_t>> allowed;
  for (const std::vector<double>& costs : rest.costs) {
    allowed.emplace_back();
    for (size_t choice = 0; choice < costs.size(); ++choice) {
      if (costs[choice] < kForbidden) {
        allowed.back().push_back(choice);
      }
    }
    if (allowed.back().empty()) {
      return false;  // bound() says so
    }
  }
  const auto found = leastByBuckets(restricted(rest, allowed), most_cells);
  if (!found.has_value()) {
    return false;
  }
  size_t place = 0;
  for (const size_t node : left_) {
    given_[node] = allowed[place][found->first[place]];
    ++place;
  }
  constant_ += found->second;
  left_.clear();
  return true;
}

Remainder::ToDecide Remainder::toDecide(size_t most_cells) const {
  const std::vector<size_t> nodes(left_.begin(), left_.end());
  BucketSizes sizes;
  std::map<size_t, size_t> place_of;
  for (const size_t node : nodes) {
    place_of[node] = sizes.num_choices.size();
    sizes.num_choices.push_back(numChoices(node));
  }
  for (const size_t node : nodes) {
    sizes.neighbors.emplace_back();
    for (const auto& [neighbor, table] : tables_[node]) {
      sizes.neighbors.back().insert(place_of[neighbor]);
    }
  }
  ToDecide out;
  BucketCells cells = bucketCells(sizes);
  while (cells.most > static_cast<double>(most_cells)) {
    size_t widest = 0;
    for (size_t place = 1; place < nodes.size(); ++place) {
      const bool is_open = sizes.num_choices[place] > 1;
      if (is_open && (sizes.num_choices[widest] < 2 || sizes.neighbors[place].size() > sizes.neighbors[widest].size())) {
        widest = place;
      }
    }
    out.nodes.push_back(nodes[widest]);
    for (const size_t neighbor : sizes.neighbors[widest]) {
      sizes.neighbors[neighbor].erase(widest);
    }
    sizes.neighbors[widest].clear();
    sizes.num_choices[widest] = 1;
    cells = bucketCells(sizes);
  }
  out.cells = cells.sum;
  return out;
}

size_t Remainder::numChoices(size_t node) const {
  return static_cast<size_t>(std::count_if(costs_[node].begin(), costs_[node].end(), [](double cost) { return cost < kForbidden; }));
}

size_t Remainder::promising(size_t node) const {
  return cheapest(costs_[node].size(), [&](size_t choice) {
    double cost = costs_[node][choice];
    for (const auto& [neighbor, table] : tables_[node]) {
      double least = kForbidden;
      for (size_t column = 0; column < table->num_columns; ++column) {
        least = std::min(least, table->at(choice, column) + costs_[neighbor][column]);
      }
      cost += least;
    }
    return cost;
  });
}

const SharedCostTable* Remainder::tableBetween(size_t node, size_t neighbor) const {
  const auto found = tables_[node].find(neighbor);
  return found == tables_[node].end() ? nullptr : &found->second;
}

double Remainder::bound() const {
  double out = constant_;
  for (const size_t node : left_) {
    out += *std::min_element(costs_[node].begin(), costs_[node].end());
    for (auto edge = tables_[node].upper_bound(node); edge != tables_[node].end(); ++edge) {
      out += *std::min_element(edge->second->costs.begin(), edge->second->costs.end());
    }
  }
  return out;
}

std::vector<size_t> Remainder::choices() const {
  std::vector<size_t> out(costs_.size());
  for (const auto& [node, choice] : given_) {
    out[node] = choice;
  }
  for (auto gone = gone_.rbegin(); gone != gone_.rend(); ++gone) {
    out[gone->node] = cheapest(gone->costs.size(), [&](size_t choice) {
      double cost = gone->costs[choice];
      for (const auto& [neighbor, table] : gone->neighbors) {
        cost += table->at(choice, out[neighbor]);
      }
      return cost;
    });
  }
  return out;
}

void Remainder::add(size_t a, size_t b, const SharedCostTable& table, const SharedCostTable& transpose) {
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

void Remainder::eliminate(size_t node) {
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
void Remainder::takeInto(const Eliminated& gone) {
  const auto& [neighbor, table] = gone.neighbors.front();
  for (size_t column = 0; column < table->num_columns; ++column) {
    double least = kForbidden;
    for (size_t row = 0; row < table->num_rows; ++row) {
      least = std::min(least, gone.costs[row] + table->at(row, column));
    }
    costs_[neighbor][column] += least;
  }
}

void Remainder::join(const Eliminated& gone) {
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

PairwiseCosts Remainder::pairwise() const {
  std::map<size_t, size_t> place_of;
  PairwiseCosts out;
  for (const size_t node : left_) {
    place_of[node] = out.costs.size();
    out.costs.push_back(costs_[node]);
  }
  for (const size_t node : left_) {
    for (auto edge = tables_[node].upper_bound(node); edge != tables_[node].end(); ++edge) {
      out.edges.push_back({place_of[node], place_of[edge->first], edge->second});
    }
  }
  return out;
}

}  // namespace xmesh::core
