// Operators cut into layers, against all cuts tried.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/parallelism/operator_clustering.h"

namespace xmesh::core {
namespace {

struct Model {
  std::vector<ModelOperator> operators;
  std::vector<ModelValue> values;
};

/// Each operator makes one value, of which later ones read; parameters are between them.
Model randomModel(std::mt19937_64& random, size_t num_operators, int zero_flops_percent, size_t largest_flops) {
  Model out;
  for (size_t op = 0; op < num_operators; ++op) {
    const bool is_free = static_cast<int>(random() % 100) < zero_flops_percent;
    ModelOperator& added = out.operators.emplace_back();
    added.num_flops = is_free ? 0 : 1 + static_cast<int64_t>(random() % largest_flops);
    for (size_t read = 0; read < random() % 4 && !out.values.empty(); ++read) {
      added.reads.push_back(random() % 2 == 0 ? out.values.size() - 1 : random() % out.values.size());
    }
    if (random() % 4 == 0) {
      out.values.push_back({std::nullopt, 1000});
    }
    out.values.push_back({op, static_cast<int64_t>(random() % 6)});
  }
  return out;
}

int64_t sumOfFlops(const Model& model, size_t first, size_t end) {
  int64_t out = 0;
  for (size_t op = first; op < end; ++op) {
    out += model.operators[op].num_flops;
  }
  return out;
}

int64_t receivedBytes(const Model& model, size_t first, size_t end) {
  std::set<size_t> received;
  for (size_t op = first; op < end; ++op) {
    for (const size_t value : model.operators[op].reads) {
      if (model.values[value].maker && *model.values[value].maker < first) {
        received.insert(value);
      }
    }
  }
  int64_t out = 0;
  for (const size_t value : received) {
    out += model.values[value].num_bytes;
  }
  return out;
}

struct CutCosts {
  int64_t largest_flops = 0;
  int64_t received = 0;
  int64_t squares = 0;
  auto operator<=>(const CutCosts&) const = default;
};

CutCosts costsOf(const Model& model, const std::vector<size_t>& firsts) {
  CutCosts out;
  for (size_t layer = 0; layer < firsts.size(); ++layer) {
    const size_t end = layer + 1 < firsts.size() ? firsts[layer + 1] : model.operators.size();
    EXPECT_LT(firsts[layer], end);
    const int64_t flops = sumOfFlops(model, firsts[layer], end);
    out.largest_flops = std::max(out.largest_flops, flops);
    out.received = std::max(out.received, receivedBytes(model, firsts[layer], end));
    out.squares += flops * flops;
  }
  return out;
}

template <typename Visit>
void forEachCut(const Model& model, std::vector<size_t>& firsts, size_t num_layers, const Visit& visit) {
  if (firsts.size() == num_layers) {
    visit(costsOf(model, firsts));
    return;
  }
  for (size_t next = firsts.back() + 1; next < model.operators.size(); ++next) {
    firsts.push_back(next);
    forEachCut(model, firsts, num_layers, visit);
    firsts.pop_back();
  }
}

/// The costs of the best cut: the least limit from `wanted_limit` on, then the bytes, then the squares.
CutCosts bestCosts(const Model& model, size_t num_layers, double slack) {
  const int64_t total = sumOfFlops(model, 0, model.operators.size());
  int64_t limit = total;
  std::vector<CutCosts> all;
  std::vector<size_t> firsts{0};
  forEachCut(model, firsts, num_layers, [&](const CutCosts& costs) {
    all.push_back(costs);
    limit = std::min(limit, costs.largest_flops);
  });
  const auto wanted = static_cast<int64_t>((1 + slack) * static_cast<double>(total) / static_cast<double>(num_layers));
  limit = std::max(limit, std::min(wanted, total));
  std::optional<CutCosts> best;
  for (const CutCosts& costs : all) {
    if (costs.largest_flops <= limit && (!best || std::pair(costs.received, costs.squares) < std::pair(best->received, best->squares))) {
      best = costs;
    }
  }
  return {limit, best->received, best->squares};
}

TEST(OperatorClustering, IsTheBestOfAllCuts) {
  for (uint64_t seed = 0; seed < 800; ++seed) {
    std::mt19937_64 random(seed);
    const size_t num_operators = 1 + random() % 11;
    // FLOPs that are often equal, often zero, or of which one outweighs all others.
    const Model model = randomModel(random, num_operators, static_cast<int>(random() % 3 * 40), random() % 2 == 0 ? 3 : 1000);
    const size_t num_layers = 1 + random() % num_operators;
    const double slack = 0.25 * static_cast<double>(random() % 5);
    const OperatorLayers found = clusterOperators(model.operators, model.values, num_layers, slack);
    const CutCosts expected = bestCosts(model, num_layers, slack);
    const CutCosts costs = costsOf(model, found.first_operators);
    ASSERT_EQ(found.first_operators.size(), num_layers) << seed;
    EXPECT_EQ(found.first_operators.front(), 0U) << seed;
    EXPECT_EQ(found.flop_limit, expected.largest_flops) << seed;
    EXPECT_LE(costs.largest_flops, found.flop_limit) << seed;
    EXPECT_EQ(found.max_received_bytes, expected.received) << seed;
    EXPECT_EQ(costs.received, expected.received) << seed;
    EXPECT_EQ(costs.squares, expected.squares) << seed;
  }
}

TEST(OperatorClustering, AHeavyOperatorRaisesTheLimit) {
  const Model model{{{1, {}}, {100, {}}, {1, {}}, {1, {}}}, {}};
  const OperatorLayers found = clusterOperators(model.operators, model.values, 3, 0.5);
  EXPECT_EQ(found.flop_limit, 100);
  EXPECT_EQ(found.first_operators, (std::vector<size_t>{0, 1, 2}));
}

TEST(OperatorClustering, OneValueOfManyReadersCountsOncePerLayer) {
  // Operator 0 makes what all others read; operator 2 makes a larger value for 3 alone.
  const Model model{{{1, {}}, {1, {0, 0}}, {1, {0}}, {1, {0, 1}}}, {{0, 8}, {2, 9}}};
  const OperatorLayers found = clusterOperators(model.operators, model.values, 2, 1.0);
  EXPECT_EQ(found.max_received_bytes, 8);
  EXPECT_EQ(found.first_operators, (std::vector<size_t>{0, 2}));
}

TEST(OperatorClustering, EqualCutsGiveTheSameOne) {
  const Model model{std::vector<ModelOperator>(9), {}};
  EXPECT_EQ(clusterOperators(model.operators, model.values, 3, 0.5).first_operators, (std::vector<size_t>{0, 1, 2}));
}

TEST(OperatorClustering, LargeNumbersStayExact) {
  const int64_t flops = (int64_t{1} << 60) - 1;
  const Model model{{{flops, {}}, {flops - 1, {}}, {flops, {}}, {flops, {}}}, {}};
  const OperatorLayers found = clusterOperators(model.operators, model.values, 2, 1.0);
  EXPECT_EQ(found.first_operators, (std::vector<size_t>{0, 2}));
}

/// Without FLOPs anything may be in one layer: then nothing limits where a layer may start.
TEST(OperatorClustering, ManyOperatorsWithoutFlops) {
  Model model{std::vector<ModelOperator>(3000), {}};
  for (size_t op = 0; op + 1 < model.operators.size(); ++op) {
    model.values.push_back({op, 4});
    model.operators[op + 1].reads.push_back(op);
  }
  model.operators[2999].num_flops = 7;
  const OperatorLayers found = clusterOperators(model.operators, model.values, 24, 0.5);
  EXPECT_EQ(found.first_operators.size(), 24U);
  EXPECT_EQ(found.max_received_bytes, 4);
  EXPECT_EQ(found.flop_limit, 7);
}

TEST(OperatorClustering, RefusesWhatIsNoModel) {
  const std::vector<ModelOperator> two{{1, {}}, {1, {0}}};
  EXPECT_THROW(clusterOperators(two, {{0, 1}}, 3, 0.5), InvalidArgument);
  EXPECT_THROW(clusterOperators(two, {{0, 1}}, 0, 0.5), InvalidArgument);
  EXPECT_THROW(clusterOperators(two, {{0, 1}}, 1, -0.5), InvalidArgument);
  EXPECT_THROW(clusterOperators(two, {{0, 1}}, 1, std::nan("")), InvalidArgument);
  EXPECT_THROW(clusterOperators(two, {}, 1, 0.5), InvalidArgument);
  EXPECT_THROW(clusterOperators(two, {{1, 1}}, 1, 0.5), InvalidArgument);
  EXPECT_THROW(clusterOperators(two, {{2, 1}}, 1, 0.5), InvalidArgument);
  EXPECT_THROW(clusterOperators(two, {{0, -1}}, 1, 0.5), InvalidArgument);
  EXPECT_THROW(clusterOperators({{-1, {}}}, {}, 1, 0.5), InvalidArgument);
  EXPECT_THROW(clusterOperators({{int64_t{1} << 61, {}}, {int64_t{1} << 61, {}}}, {}, 1, 0.5), InvalidArgument);
}

}  // namespace
}  // namespace xmesh::core
