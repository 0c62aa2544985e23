// Conversions of values on a mesh, against the sets of elements that each device holds.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/parallelism/conversion_cost.h"
#include "core/parallelism/program_run.h"

namespace xmesh::core {
namespace {

using Elements = std::set<std::vector<int64_t>>;
using Coordinate = std::vector<int64_t>;
using program_run::grid;

std::vector<AxisLinks> linksOf(const std::vector<int64_t>& shape) {
  std::vector<AxisLinks> out;
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    out.push_back({shape[axis], 1.0, axis == 0 ? 1.0 : 0.125});
  }
  return out;
}

/// What each device has, of a value whose dims all have `extent` elements. The summands of a sum are as large as the sum.
std::map<Coordinate, Elements> heldBy(const std::vector<int64_t>& shape, const ValueState& state, size_t num_dims, int64_t extent) {
  std::map<Coordinate, Elements> out;
  for (const Coordinate& device : grid(shape)) {
    std::vector<std::pair<int64_t, int64_t>> box(num_dims, {0, extent});
    for (size_t axis = 0; axis < shape.size(); ++axis) {
      if (state[axis] >= 0) {
        auto& [begin, end] = box[static_cast<size_t>(state[axis])];
        const int64_t part = (end - begin) / shape[axis];
        begin += device[axis] * part;
        end = begin + part;
      }
    }
    for (const Coordinate& element : grid(std::vector<int64_t>(num_dims, extent))) {
      const auto is_inside = [&](size_t dim) { return element[dim] >= box[dim].first && element[dim] < box[dim].second; };
      bool is_held = true;
      for (size_t dim = 0; dim < num_dims; ++dim) {
        is_held = is_held && is_inside(dim);
      }
      if (is_held) {
        out[device].insert(element);
      }
    }
  }
  return out;
}

struct Change {
  bool is_possible = false;
  double cost = 0;
};

/// What one change along one axis is, from the sets alone.
Change changeOf(const std::vector<int64_t>& shape, size_t axis, const ValueState& from, const ValueState& to, size_t num_dims, int64_t extent,
                const CollectiveCostModel& model) {
  const auto before = heldBy(shape, from, num_dims, extent);
  const auto after = heldBy(shape, to, num_dims, extent);
  const bool was_sum = from[axis] == kPartialSum;
  const bool is_sum = to[axis] == kPartialSum;
  std::set<Collective> needed;
  double num_bytes = 0;
  for (const auto& [device, wanted] : after) {
    Elements all;
    size_t count = 0;
    Elements all_after;
    size_t count_after = 0;
    for (int64_t other = 0; other < shape[axis]; ++other) {
      Coordinate neighbor = device;
      neighbor[axis] = other;
      all.insert(before.at(neighbor).begin(), before.at(neighbor).end());
      count += before.at(neighbor).size();
      all_after.insert(after.at(neighbor).begin(), after.at(neighbor).end());
      count_after += after.at(neighbor).size();
    }
    const Elements& own = before.at(device);
    num_bytes = static_cast<double>(all.size());
    const bool is_partition = count == all.size();
    const bool is_partition_after = count_after == all_after.size();
    if (is_sum) {
      if (was_sum || from[axis] != kReplicated) {
        return {};
      }
    } else if (was_sum) {
      if (own == wanted) {
        needed.insert(Collective::kAllReduce);
      } else if (all_after == own && is_partition_after) {
        needed.insert(Collective::kReduceScatter);
      } else {
        return {};
      }
    } else if (!std::includes(own.begin(), own.end(), wanted.begin(), wanted.end())) {
      if (all == wanted && is_partition) {
        needed.insert(Collective::kAllGather);
      } else if (all == all_after && is_partition && is_partition_after) {
        needed.insert(Collective::kAllToAll);
      } else {
        return {};
      }
    }
  }
  return {true, needed.empty() ? 0 : model.cost(*needed.begin(), num_bytes, linksOf(shape)[axis])};
}

TEST(ConversionCosts, AreTheCheapestWayOverAllChangesOfOneAxis) {
  struct Case {
    std::vector<int64_t> shape;
    size_t num_dims;
    int64_t extent;
  };
  const std::vector<Case> cases = {{{4}, 1, 4}, {{4}, 2, 4}, {{2, 2}, 1, 4}, {{2, 2}, 2, 4}, {{4, 2}, 2, 8}, {{2, 2, 2}, 1, 8}};
  for (const CollectiveCostModel& model : collectiveCostModels()) {
    for (const Case& mesh : cases) {
      double num_elements = 1;
      for (size_t dim = 0; dim < mesh.num_dims; ++dim) {
        num_elements *= static_cast<double>(mesh.extent);
      }
      const ConversionCosts found(std::vector<int64_t>(mesh.num_dims, mesh.extent), num_elements, linksOf(mesh.shape), model);
      const std::vector<ValueState>& states = found.states();
      const size_t count = states.size();
      std::vector<double> wanted(count * count, std::numeric_limits<double>::infinity());
      for (size_t from = 0; from < count; ++from) {
        wanted[from * count + from] = 0;
        for (size_t to = 0; to < count; ++to) {
          std::vector<size_t> changed;
          for (size_t axis = 0; axis < mesh.shape.size(); ++axis) {
            if (states[from][axis] != states[to][axis]) {
              changed.push_back(axis);
            }
          }
          if (changed.size() != 1) {
            continue;
          }
          const Change change = changeOf(mesh.shape, changed[0], states[from], states[to], mesh.num_dims, mesh.extent, model);
          if (change.is_possible) {
            wanted[from * count + to] = change.cost;
          }
        }
      }
      for (size_t middle = 0; middle < count; ++middle) {
        for (size_t from = 0; from < count; ++from) {
          for (size_t to = 0; to < count; ++to) {
            wanted[from * count + to] = std::min(wanted[from * count + to], wanted[from * count + middle] + wanted[middle * count + to]);
          }
        }
      }
      for (size_t from = 0; from < count; ++from) {
        for (size_t to = 0; to < count; ++to) {
          const std::string text = model.name + " " + valueStateStr(states[from]) + " -> " + valueStateStr(states[to]);
          ASSERT_NEAR(found.cost(states[from], states[to]), wanted[from * count + to], 1e-9) << text;
          double sum = 0;
          ValueState state = states[from];
          for (const ConversionStep& step : found.steps(states[from], states[to])) {
            ValueState next = state;
            next[step.axis] = step.to[step.axis];
            ASSERT_EQ(next, step.to) << text;
            state = next;
            sum += step.collective.has_value() ? model.cost(*step.collective, step.num_bytes, linksOf(mesh.shape)[step.axis]) : 0;
          }
          ASSERT_EQ(state, states[to]) << text;
          ASSERT_NEAR(sum, wanted[from * count + to], 1e-9) << text;
        }
      }
    }
  }
}

/// Alpa's Table 2, of a value of M bytes on a mesh of n0 x n1, where messages cost more than their bytes. It counts an all-to-all by what a device
/// holds, we by what all along the axis hold.
TEST(ConversionCosts, AreThoseOfAlpasTable2) {
  constexpr double kM = 4800;
  constexpr int64_t kN0 = 2;
  constexpr int64_t kN1 = 4;
  const ConversionCosts costs({120, 40}, kM, {{kN0, 1e6, 1}, {kN1, 1e6, 0.125}}, alpaCosts());
  const auto only = [&](const ValueState& from, const ValueState& to) {
    std::vector<ConversionStep> out = costs.steps(from, to);
    std::erase_if(out, [](const ConversionStep& step) { return !step.collective.has_value(); });
    return out;
  };
  const ValueState all{kReplicated, kReplicated};
  EXPECT_TRUE(only(all, {0, 1}).empty());
  EXPECT_EQ(costs.cost(all, {0, 1}), 0);
  EXPECT_EQ(only({0, kReplicated}, all), (std::vector<ConversionStep>{{0, all, Collective::kAllGather, kM}}));
  const ValueState rows{0, kReplicated};
  EXPECT_EQ(only({0, 1}, rows), (std::vector<ConversionStep>{{1, rows, Collective::kAllGather, kM / kN0}}));
  const ValueState columns{1, kReplicated};
  EXPECT_EQ(only(rows, columns), (std::vector<ConversionStep>{{0, columns, Collective::kAllToAll, kM / kN0 * kN0}}));
  const ValueState both{0, 0};
  EXPECT_EQ(only({0, 1}, both), (std::vector<ConversionStep>{{1, both, Collective::kAllToAll, kM / (kN0 * kN1) * kN1}}));
}

/// Where one axis is slow, fewer bytes cross it: both take a part of the value along the other axis first.
TEST(ConversionCosts, CrossASlowAxisWithFewerBytes) {
  const ConversionCosts costs({120, 40}, 4800, {{2, 1, 1}, {4, 1, 0.125}}, alpaCosts());
  const ValueState all{kReplicated, kReplicated};
  std::vector<std::string> way;
  for (const ConversionStep& step : costs.steps({0, kReplicated}, all)) {
    way.push_back((step.collective.has_value() ? std::string(collectiveName(*step.collective)) : "slice") + " to " + valueStateStr(step.to));
  }
  ASSERT_EQ(way.size(), 3);
  EXPECT_EQ(way[1].substr(0, 10), "all-gather");
  EXPECT_EQ(way[2], "all-gather to RR");
  EXPECT_LT(costs.cost({0, kReplicated}, all), 1 + 0.5 * 4800);
}

/// An all-reduce over both axes, and what shards one dim over both, in the only order there is.
TEST(ConversionCosts, GoDirectlyWhereTheyAreTold) {
  const std::vector<AxisLinks> axes{{2, 1, 1}, {4, 1, 0.125}};
  const CollectiveCostModel model = alpaCosts();
  const ConversionCosts any({120, 40}, 4800, axes, model);
  const ConversionCosts direct({120, 40}, 4800, axes, model, ConversionWays::kDirect);
  const ValueState all{kReplicated, kReplicated};
  const ValueState sums{kPartialSum, kPartialSum};
  const double both = model.cost(Collective::kAllReduce, 4800, axes[0]) + model.cost(Collective::kAllReduce, 4800, axes[1]);
  EXPECT_DOUBLE_EQ(direct.cost(sums, all), both);
  EXPECT_LT(any.cost(sums, all), both);
  for (const ValueState& from : any.states()) {
    for (const ValueState& to : any.states()) {
      EXPECT_GE(direct.cost(from, to) + 1e-9, any.cost(from, to)) << valueStateStr(from) << " -> " << valueStateStr(to);
      double sum = 0;
      ValueState state = from;
      for (const ConversionStep& step : direct.steps(from, to)) {
        sum += step.collective.has_value() ? model.cost(*step.collective, step.num_bytes, axes[step.axis]) : 0;
        state = step.to;
      }
      EXPECT_EQ(state, to);
      EXPECT_NEAR(sum, direct.cost(from, to), 1e-9);
    }
  }
}

/// A dim of 3 is not halved on the way, and one of 2 not quartered.
TEST(ConversionCosts, ShardOnlyWhatDivides) {
  const CollectiveCostModel model = alpaCosts();
  const std::vector<AxisLinks> axes{{2, 1, 1}, {2, 1, 0.125}};
  const ConversionCosts costs({3, 2}, 4800, axes, model);
  EXPECT_EQ(costs.cost({kReplicated, kReplicated}, {0, kReplicated}), kForbidden);
  EXPECT_EQ(costs.cost({kReplicated, kReplicated}, {1, 1}), kForbidden);
  EXPECT_EQ(costs.cost({kReplicated, kReplicated}, {kReplicated, 1}), 0);
  const ConversionCosts odd({3, 1}, 4800, axes, model);
  EXPECT_DOUBLE_EQ(odd.cost({kPartialSum, kReplicated}, {kReplicated, kReplicated}), model.cost(Collective::kAllReduce, 4800, axes[0]));
}

TEST(ConversionCosts, RefusesWhatIsNoState) {
  const ConversionCosts costs({4, 4}, 8, linksOf({2, 2}), ringCosts());
  EXPECT_THROW(costs.cost({0}, {0, 1}), InvalidArgument);
  EXPECT_THROW(costs.cost({0, 2}, {0, 1}), InvalidArgument);
  EXPECT_THROW(costs.cost({0, -3}, {0, 1}), InvalidArgument);
  EXPECT_THROW(ConversionCosts({4, 4}, 8, {}, ringCosts()), InvalidArgument);
  EXPECT_THROW(ConversionCosts({4, 4}, 8, linksOf({2, 2, 2, 2}), ringCosts()), InvalidArgument);
  EXPECT_THROW(ConversionCosts({4, 4}, 8, {{0, 1, 1}}, ringCosts()), InvalidArgument);
  EXPECT_THROW(ConversionCosts({4, 4}, 8, {{2, -1, 1}}, ringCosts()), InvalidArgument);
  EXPECT_THROW(collectiveCostModel("tree"), InvalidArgument);
  EXPECT_EQ(collectiveCostModel("gloo").name, "gloo");
}

/// The figures by hand, of 4 devices with latency 3 and 0.5 per byte.
TEST(CollectiveCosts, AreTheFormulas) {
  const AxisLinks links{4, 3, 0.5};
  const auto of = [&](const char* name, Collective collective) { return collectiveCostModel(name).cost(collective, 800, links); };
  EXPECT_DOUBLE_EQ(of("alpa", Collective::kAllReduce), 3 + 2 * 300 + 0.01);
  EXPECT_DOUBLE_EQ(of("alpa", Collective::kAllGather), 3 + 300 + 0.1);
  EXPECT_DOUBLE_EQ(of("alpa", Collective::kReduceScatter), 3 + 300 + 0.001);
  EXPECT_DOUBLE_EQ(of("alpa", Collective::kAllToAll), 3 + 0.5 * 3 / 16 * 800 * 2 + 0.001);
  EXPECT_DOUBLE_EQ(of("ring", Collective::kAllReduce), 2 * 3 * (3 + 100));
  EXPECT_DOUBLE_EQ(of("ring", Collective::kAllGather), 3 * (3 + 100));
  EXPECT_DOUBLE_EQ(of("ring", Collective::kAllToAll), 3 * (3 + 25));
  EXPECT_DOUBLE_EQ(of("gloo", Collective::kReduceScatter), of("ring", Collective::kAllReduce));
  EXPECT_DOUBLE_EQ(of("gloo", Collective::kAllGather), of("ring", Collective::kAllGather));
  for (const CollectiveCostModel& model : collectiveCostModels()) {
    for (const Collective collective : {Collective::kAllReduce, Collective::kAllGather, Collective::kReduceScatter, Collective::kAllToAll}) {
      EXPECT_EQ(model.cost(collective, 800, {1, 3, 0.5}), 0) << model.name << " " << collectiveName(collective);
    }
  }
}

}  // namespace
}  // namespace xmesh::core
