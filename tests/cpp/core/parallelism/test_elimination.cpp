// The least cost of sharding choices, against all of them tried.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/parallelism/bucket_elimination.h"
#include "core/parallelism/dominated_choices.h"
#include "core/parallelism/elimination.h"

namespace xmesh::core {
namespace {

/// Whole numbers, whose sums are exact in any order.
double randomCost(std::mt19937_64& random, int forbidden_percent) {
  return static_cast<int>(random() % 100) < forbidden_percent ? kForbidden : static_cast<double>(random() % 1000);
}

std::vector<double> randomCosts(std::mt19937_64& random, size_t count, int forbidden_percent) {
  std::vector<double> out(count);
  std::generate(out.begin(), out.end(), [&] { return randomCost(random, forbidden_percent); });
  return out;
}

SharedCostTable randomTable(std::mt19937_64& random, size_t num_rows, size_t num_columns, int forbidden_percent) {
  return std::make_shared<CostTable>(CostTable{num_rows, num_columns, randomCosts(random, num_rows * num_columns, forbidden_percent)});
}

/// Any edges, several between the same two nodes and in either direction among them.
StrategyGraph randomGraph(std::mt19937_64& random, size_t num_nodes, size_t num_edges, int forbidden_percent) {
  StrategyGraph out;
  for (size_t node = 0; node < num_nodes; ++node) {
    out.addNode("n" + std::to_string(node), randomCosts(random, 1 + random() % 4, forbidden_percent));
  }
  for (size_t edge = 0; edge < num_edges; ++edge) {
    const size_t from = random() % num_nodes;
    const size_t to = (from + 1 + random() % (num_nodes - 1)) % num_nodes;
    out.addEdge(from, to, randomTable(random, out.numChoices(from), out.numChoices(to), forbidden_percent));
  }
  return out;
}

/// Calls `visit` with every choice of all nodes.
template <typename Visit>
void forEachChoice(const StrategyGraph& graph, Visit visit) {
  std::vector<size_t> choice_of(graph.nodes().size(), 0);
  while (true) {
    visit(choice_of);
    size_t node = 0;
    while (node < choice_of.size() && ++choice_of[node] == graph.numChoices(node)) {
      choice_of[node++] = 0;
    }
    if (node == choice_of.size()) {
      return;
    }
  }
}

double leastOfAll(const StrategyGraph& graph) {
  double out = kForbidden;
  forEachChoice(graph, [&](const std::vector<size_t>& choice_of) { out = std::min(out, graph.cost(choice_of)); });
  return out;
}

TEST(Elimination, FindsWhatBruteForceFinds) {
  std::mt19937_64 random(1);
  int num_impossible = 0;
  for (int round = 0; round < 1000; ++round) {
    const size_t num_nodes = 2 + random() % 6;
    const StrategyGraph graph = randomGraph(random, num_nodes, random() % (2 * num_nodes), round % 3 == 0 ? 30 : 0);
    const double least = leastOfAll(graph);
    if (least == kForbidden) {
      ++num_impossible;
      EXPECT_THROW(leastCost(graph), InvalidArgument) << "round " << round;
      continue;
    }
    const ShardingChoices found = leastCost(graph);
    ASSERT_EQ(found.cost, least) << "round " << round;
    ASSERT_EQ(graph.cost(found.choice_of), least) << "round " << round;
    ASSERT_EQ(leastCost(graph).choice_of, found.choice_of) << "round " << round;
  }
  EXPECT_GT(num_impossible, 10);
}

/// Nothing of it has two neighbors at most.
TEST(Elimination, DecidesGraphsInWhichAllNodesMeet) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 50; ++round) {
    StrategyGraph graph;
    const size_t num_nodes = 4 + round % 4;
    for (size_t node = 0; node < num_nodes; ++node) {
      graph.addNode("n" + std::to_string(node), randomCosts(random, 3, 5));
      for (size_t other = 0; other < node; ++other) {
        graph.addEdge(node, other, randomTable(random, 3, graph.numChoices(other), 5));
      }
    }
    const double least = leastOfAll(graph);
    if (least < kForbidden) {
      ASSERT_EQ(leastCost(graph).cost, least) << "round " << round;
    }
  }
}

/// Four nodes that all meet: with so many choices the tables over all of them would be too large, and each choice of one is tried.
TEST(Elimination, BranchesWhereTablesWouldBeTooLarge) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 3; ++round) {
    StrategyGraph graph;
    PairwiseCosts same;
    for (size_t node = 0; node < 4; ++node) {
      graph.addNode("n" + std::to_string(node), randomCosts(random, 64, 5));
      same.costs.push_back(graph.nodes().back().costs);
      for (size_t other = 0; other < node; ++other) {
        graph.addEdge(node, other, randomTable(random, 64, 64, 5));
        same.edges.push_back({node, other, graph.edges().back().costs});
      }
    }
    EXPECT_FALSE(leastByBuckets(same, size_t{1} << 20).has_value());
    const auto found = leastByBuckets(same, size_t{1} << 25);
    ASSERT_TRUE(found.has_value());
    EXPECT_EQ(leastCost(graph).cost, found->second) << "round " << round;
    EXPECT_EQ(graph.cost(found->first), found->second) << "round " << round;
  }
}

/// Scans: in each, steps in a row, all of which read the same few nodes.
StrategyGraph scans(std::mt19937_64& random, size_t num_scans, size_t num_read, size_t num_steps = 6) {
  StrategyGraph out;
  for (size_t scan = 0; scan < num_scans; ++scan) {
    std::vector<size_t> read;
    for (size_t hub = 0; hub < num_read; ++hub) {
      read.push_back(out.addNode("hub", randomCosts(random, 16, 0)));
    }
    std::optional<size_t> before;
    for (size_t step = 0; step < num_steps; ++step) {
      const size_t node = out.addNode("step", randomCosts(random, 20, 0));
      for (const size_t hub : read) {
        out.addEdge(hub, node, randomTable(random, 16, 20, 0));
      }
      if (before.has_value()) {
        out.addEdge(*before, node, randomTable(random, 20, 20, 0));
      }
      before = node;
    }
  }
  return out;
}

/// What would take for ever is searched by descent, and says so: each scan's best is known, and nothing is better with one node changed.
TEST(Elimination, DescendsWhereBranchesWouldBeTooMany) {
  double least = 0;
  std::mt19937_64 random(0);
  for (int scan = 0; scan < 3; ++scan) {
    const ShardingChoices one = leastCost(scans(random, 1, 4));
    EXPECT_TRUE(one.is_exact);
    least += one.cost;
  }
  random.seed(0);
  const StrategyGraph graph = scans(random, 3, 4);
  const ShardingChoices found = leastCost(graph);
  EXPECT_FALSE(found.is_exact);
  EXPECT_GE(found.cost, least * (1 - 1e-12));
  EXPECT_LE(found.cost, least * 1.1);
  EXPECT_EQ(leastCost(graph).choice_of, found.choice_of);
  for (size_t node = 0; node < graph.nodes().size(); ++node) {
    std::vector<size_t> other = found.choice_of;
    for (other[node] = 0; other[node] < graph.numChoices(node); ++other[node]) {
      EXPECT_GE(graph.cost(other), found.cost * (1 - 1e-12)) << "node " << node;
    }
  }
}

/// Few branches of large tables, and many of none: each ends. (A test that does not end fails by its time.)
TEST(Elimination, EndsWhateverTheGraph) {
  std::mt19937_64 random(5);
  for (const size_t num_read : {5, 6, 7}) {
    EXPECT_LT(leastCost(scans(random, 1, num_read, 64)).cost, kForbidden) << num_read << " that all read";
  }
  StrategyGraph graph;
  for (size_t node = 0; node < 60; ++node) {
    graph.addNode("n", randomCosts(random, 8, 0));
  }
  for (size_t edge = 0; edge < 90; ++edge) {
    const size_t from = random() % 60;
    const size_t to = (from + 1 + random() % 59) % 60;
    graph.addEdge(from, to, randomTable(random, 8, 8, 45));
  }
  try {
    leastCost(graph);
  } catch (const InvalidArgument&) {  // nothing was found
  }
}

TEST(Elimination, LeavesACheapestChoiceAmongThoseNotDominated) {
  std::mt19937_64 random(4);
  size_t num_gone = 0;
  for (int round = 0; round < 500; ++round) {
    const size_t num_nodes = 2 + random() % 5;
    const StrategyGraph graph = randomGraph(random, num_nodes, random() % (2 * num_nodes), round % 3 == 0 ? 30 : 0);
    const double least = leastOfAll(graph);
    PairwiseCosts problem;
    for (const StrategyNode& node : graph.nodes()) {
      problem.costs.push_back(node.costs);
    }
    for (const StrategyEdge& edge : graph.edges()) {
      problem.edges.push_back({edge.from, edge.to, edge.costs});
    }
    const std::vector<std::vector<size_t>> choices = undominatedChoices(problem);
    const bool is_possible = std::none_of(choices.begin(), choices.end(), [](const auto& one) { return one.empty(); });
    if (least == kForbidden) {
      continue;
    }
    ASSERT_TRUE(is_possible) << "round " << round;
    const auto found = leastByBuckets(restricted(problem, choices), size_t{1} << 24);
    ASSERT_TRUE(found.has_value());
    EXPECT_DOUBLE_EQ(found->second, least) << "round " << round;
    for (size_t node = 0; node < num_nodes; ++node) {
      num_gone += graph.numChoices(node) - choices[node].size();
    }
  }
  EXPECT_GT(num_gone, 500);
}

/// A model's shape: layers of a few operators in a row, with a value that goes around them.
StrategyGraph layers(std::mt19937_64& random, size_t num_layers, size_t num_choices) {
  StrategyGraph out;
  size_t value = out.addNode("in", randomCosts(random, num_choices, 0));
  std::vector<SharedCostTable> tables(8);
  std::generate(tables.begin(), tables.end(), [&] { return randomTable(random, num_choices, num_choices, 0); });
  const std::vector<double> costs = randomCosts(random, num_choices, 0);
  for (size_t layer = 0; layer < num_layers; ++layer) {
    const size_t before = value;
    for (size_t op = 0; op < 6; ++op) {
      const size_t next = out.addNode("op" + std::to_string(layer) + "." + std::to_string(op), costs);
      out.addEdge(value, next, tables[op]);
      value = next;
    }
    const size_t sum = out.addNode("sum" + std::to_string(layer), costs);
    out.addEdge(value, sum, tables[6]);
    out.addEdge(before, sum, tables[7]);
    value = sum;
  }
  return out;
}

TEST(Elimination, EqualLayersAreTablesThatMultiply) {
  std::mt19937_64 random(3);
  for (const size_t num_layers : {1, 2, 5}) {
    for (const size_t num_choices : {1, 3, 7}) {
      const std::mt19937_64 same = random;
      std::mt19937_64 of_one = same;
      std::mt19937_64 of_all = same;
      const StrategyGraph one = layers(of_one, 1, num_choices);
      const StrategyGraph all = layers(of_all, num_layers, num_choices);
      const CostTable layer = costBetween(one, 0, one.nodes().size() - 1);
      CostTable with_end = layer;
      for (size_t row = 0; row < num_choices; ++row) {
        for (size_t column = 0; column < num_choices; ++column) {
          with_end.costs[row * num_choices + column] += one.nodes().back().costs[column];
        }
      }
      CostTable product = with_end;
      for (size_t count = 1; count < num_layers; ++count) {
        product = minPlusProduct(product, with_end);
      }
      double least = kForbidden;
      for (size_t row = 0; row < num_choices; ++row) {
        for (size_t column = 0; column < num_choices; ++column) {
          least = std::min(least, all.nodes().front().costs[row] + product.at(row, column));
        }
      }
      EXPECT_EQ(leastCost(all).cost, least) << num_layers << " layers of " << num_choices << " choices";
      random();
    }
  }
}

TEST(Elimination, TablesBetweenTwoNodesAreTheLeastOverAllOthers) {
  std::mt19937_64 random(4);
  int num_reduced = 0;
  for (int round = 0; round < 300; ++round) {
    const size_t num_nodes = 3 + random() % 4;
    const StrategyGraph graph = randomGraph(random, num_nodes, num_nodes, 10);
    CostTable found;
    try {
      found = costBetween(graph, 0, 1);
    } catch (const InvalidArgument&) {
      continue;
    }
    ++num_reduced;
    CostTable wanted{graph.numChoices(0), graph.numChoices(1), std::vector<double>(graph.numChoices(0) * graph.numChoices(1), kForbidden)};
    // With their own costs, which must not be forbidden here to be taken away again.
    StrategyGraph free;
    for (size_t node = 0; node < num_nodes; ++node) {
      free.addNode(graph.nodes()[node].name, node < 2 ? std::vector<double>(graph.numChoices(node), 0) : graph.nodes()[node].costs);
    }
    for (const StrategyEdge& edge : graph.edges()) {
      free.addEdge(edge.from, edge.to, edge.costs);
    }
    forEachChoice(free, [&](const std::vector<size_t>& choice_of) {
      double& least = wanted.costs[choice_of[0] * wanted.num_columns + choice_of[1]];
      least = std::min(least, free.cost(choice_of));
    });
    ASSERT_EQ(found, wanted) << "round " << round;
  }
  EXPECT_GT(num_reduced, 200);
}

TEST(Elimination, SaysWhatCannotBeServed) {
  const auto text = [](const StrategyGraph& graph) -> std::string {
    try {
      leastCost(graph);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  StrategyGraph no_choice;
  no_choice.addNode("attention", {kForbidden, kForbidden});
  EXPECT_EQ(text(no_choice), "these sharding choices leave nothing: node attention may not take any of its 2 choices");
  StrategyGraph no_way;
  no_way.addNode("a", {1});
  no_way.addNode("b", {1, 2});
  no_way.addEdge(0, 1, std::make_shared<CostTable>(CostTable{1, 2, {kForbidden, kForbidden}}));
  EXPECT_EQ(text(no_way), "these sharding choices leave nothing: no choice of node a goes with one of node b");
  EXPECT_EQ(leastCost(StrategyGraph()).cost, 0);
}

TEST(StrategyGraph, RefusesWhatDoesNotFit) {
  StrategyGraph graph;
  graph.addNode("a", {1, 2});
  graph.addNode("b", {1, 2, 3});
  EXPECT_THROW(graph.addNode("c", {}), InvalidArgument);
  EXPECT_THROW(graph.addNode("c", {std::nan("")}), InvalidArgument);
  EXPECT_THROW(graph.addEdge(0, 0, std::make_shared<CostTable>(CostTable{2, 2, {1, 2, 3, 4}})), InvalidArgument);
  EXPECT_THROW(graph.addEdge(0, 2, std::make_shared<CostTable>(CostTable{2, 2, {1, 2, 3, 4}})), InvalidArgument);
  EXPECT_THROW(graph.addEdge(1, 0, std::make_shared<CostTable>(CostTable{2, 3, {1, 2, 3, 4, 5, 6}})), InvalidArgument);
  EXPECT_THROW(graph.addEdge(0, 1, nullptr), InvalidArgument);
  EXPECT_THROW(graph.cost({0}), InvalidArgument);
  EXPECT_THROW(graph.cost({0, 3}), InvalidArgument);
  EXPECT_THROW(minPlusProduct({1, 2, {1, 2}}, {1, 1, {1}}), InvalidArgument);
  graph.addEdge(0, 1, std::make_shared<CostTable>(CostTable{2, 3, {1, 2, 3, 4, 5, 6}}));
  EXPECT_EQ(graph.cost({1, 2}), 2 + 3 + 6);
}

}  // namespace
}  // namespace xmesh::core
