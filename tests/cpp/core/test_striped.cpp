#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

#include "core/resharding/host_load.h"
#include "core/resharding/plan_resharding.h"
#include "core/resharding/striped/port_matching.h"
#include "core/resharding/striped/water_fill.h"
#include "core/resharding/validate.h"
#include "published_cases.h"
#include "random_layouts.h"

namespace xmesh::core {
namespace {

/// The facts of the model: 25 MB/s NICs, nothing but bytes on NICs costs time.
LinkModel bytesOnly() {
  return {.nic_bytes_per_s = 25'000'000, .local_bytes_per_s = 1'000'000'000'000'000, .latency_us = 0, .message_us = 0, .local_latency_us = 0};
}

Topology onHosts(const TensorPair& pair, int64_t devices_per_host) {
  const int64_t last = std::max(*std::max_element(pair.src.mesh.ranks().begin(), pair.src.mesh.ranks().end()),
                                *std::max_element(pair.dst.mesh.ranks().begin(), pair.dst.mesh.ranks().end()));
  return Topology::uniform(last + 1, devices_per_host, bytesOnly());
}

double ratioOn(const TensorPair& pair, const Topology& topology, const char* strategy) {
  const ReshardingPlan plan = planResharding({pair}, topology, parseStrategy(strategy));
  return plan.lower_bound_seconds > 0 ? plan.predicted_seconds / plan.lower_bound_seconds : 1;
}

double ratioOf(const TensorPair& pair, int64_t devices_per_host, const char* strategy) {
  return ratioOn(pair, onHosts(pair, devices_per_host), strategy);
}

TEST(Striped, PublishedCasesReachTheBound) {
  for (const layouts::PublishedCase& published : layouts::publishedCases()) {
    const bool is_replicated = published.dst[0] == Placement::replicate();
    EXPECT_LE(ratioOf(layouts::pairOf(published), 4, "striped:num_chunks=64"), is_replicated ? 1.017 : 1.0001) << published.name;
  }
}

TEST(Striped, OneRootReachesManyHostsInLogarithmicDepth) {
  const DType dtype = DType::parse("float32");
  for (const int64_t num_hosts : {1, 2, 3, 5, 8}) {
    std::vector<int64_t> needers(static_cast<size_t>(num_hosts));
    std::iota(needers.begin(), needers.end(), int64_t{1});
    const TensorPair pair{{{1 << 22}, dtype, Mesh({1}, {0}), {Placement::replicate()}},
                          {{1 << 22}, dtype, Mesh({num_hosts}, needers), {Placement::replicate()}}};
    int64_t depth = 0;
    while ((int64_t{1} << depth) < num_hosts + 1) {
      ++depth;
    }
    EXPECT_LE(ratioOf(pair, 1, "striped:num_chunks=64"), 1 + static_cast<double>(depth) / 64) << num_hosts;
  }
}

TEST(Striped, SplitsAReplicatedSliceOverItsHolders) {
  const DType dtype = DType::parse("float32");
  const TensorPair pair{{{1 << 20}, dtype, Mesh({2}, {0, 1}), {Placement::replicate()}},
                        {{1 << 20}, dtype, Mesh({1}, {2}), {Placement::replicate()}}};
  const Topology topology({{0, 0}, {1, 1}, {2, 2}}, bytesOnly(), {{0, 10'000'000}, {1, 15'000'000}, {2, 100'000'000}});
  const ReshardingPlan plan = planResharding({pair}, topology, parseStrategy("striped:num_chunks=64"));
  EXPECT_NEAR(static_cast<double>(plan.bytesSent().at(0)), 0.4 * (1 << 22), 64);
  EXPECT_LE(plan.predicted_seconds, 1.03 * plan.lower_bound_seconds);
}

TEST(Striped, PartialOnTwoHostsReducesHalfOnEach) {
  const DType dtype = DType::parse("float32");
  const TensorPair pair{{{1 << 20}, dtype, Mesh({2}, {0, 1}), {Placement::partial(ReduceOp::kSum)}},
                        {{1 << 20}, dtype, Mesh({2}, {0, 1}), {Placement::replicate()}}};
  EXPECT_LE(ratioOf(pair, 1, "striped:num_chunks=64"), 1.04);
  EXPECT_GE(ratioOf(pair, 1, "broadcast:num_chunks=64"), 1.0);
}

/// Rows over all ranks to columns over the devices of each host: whoever holds a slice has no use for half of it.
TEST(Striped, GathersOverOneConnectionPerDeviceAndPairOfHosts) {
  const DType dtype = DType::parse("float32");
  const Mesh line({6}, {0, 1, 2, 3, 4, 5});
  const TensorPair pair{{{1 << 10, 1 << 10}, dtype, line, {Placement::shard(0)}},
                        {{1 << 10, 1 << 10}, dtype, Mesh({3, 2}, line.ranks()), {Placement::replicate(), Placement::shard(1)}}};
  const ReshardingPlan plan = planResharding({pair}, onHosts(pair, 2), parseStrategy("striped:num_chunks=64"));
  validatePlan(plan);
  EXPECT_LE(plan.predicted_seconds, 1.02 * plan.lower_bound_seconds);
  for (const Message& message : plan.messages) {
    if (message.src_rank / 2 != message.dst_rank / 2) {
      EXPECT_EQ(message.src_rank % 2, message.dst_rank % 2);
    }
  }
}

TEST(Striped, AddsContributionsUpOnTheWay) {
  const DType dtype = DType::parse("float32");
  const auto sum = Placement::partial(ReduceOp::kSum);
  const auto ratio = [&](std::vector<Placement> src, std::vector<int64_t> needers, const char* strategy) {
    const auto count = static_cast<int64_t>(needers.size());
    const TensorPair pair{{{1 << 20}, dtype, Mesh({4, 2}, {0, 1, 2, 3, 4, 5, 6, 7}), std::move(src)},
                          {{1 << 20}, dtype, Mesh({count}, std::move(needers)), {Placement::replicate()}}};
    const ReshardingPlan plan = planResharding({pair}, onHosts(pair, 2), parseStrategy(strategy));
    validatePlan(plan);
    return plan.predicted_seconds / plan.lower_bound_seconds;
  };
  EXPECT_GE(ratio({sum, Placement::replicate()}, {8, 9}, "broadcast:num_chunks=64"), 3.9) << "the reducing host receives every contribution";
  EXPECT_LE(ratio({sum, Placement::replicate()}, {8, 9}, "striped:num_chunks=64"), 1.1);
  EXPECT_LE(ratio({sum, Placement::shard(0)}, {8, 9}, "striped:num_chunks=64"), 1.1);
  EXPECT_LE(ratio({sum, sum}, {8, 9}, "striped:num_chunks=64"), 1.1) << "a host adds up what its ranks hold";
  EXPECT_LE(ratio({sum, sum}, {0, 1}, "striped:num_chunks=64"), 1.1);
  EXPECT_LE(ratio({sum, sum}, {8, 9, 10, 11}, "striped:num_chunks=64"), 1.2);
  EXPECT_LE(ratio({sum, sum}, {8, 9, 10, 11, 12, 13, 14, 15}, "striped:num_chunks=64"), 1.35);
}

TEST(Striped, CountsTheBytesOfHalfTypesSums) {
  const DType dtype = DType::parse("bfloat16");
  const TensorPair pair{{{1 << 20}, dtype, Mesh({4}, {0, 1, 2, 3}), {Placement::partial(ReduceOp::kAvg)}},
                        {{1 << 20}, dtype, Mesh({1}, {4}), {Placement::replicate()}}};
  const ReshardingPlan plan = planResharding({pair}, onHosts(pair, 1), parseStrategy("striped:num_chunks=64"));
  const std::map<int64_t, int64_t> received = plan.bytesReceived();
  EXPECT_EQ(received.at(0), 0) << "the first of the chain";
  EXPECT_EQ(received.at(1), 2 << 20) << "a contribution in the tensor's type";
  EXPECT_EQ(received.at(2), 4 << 20) << "a sum in float32";
  EXPECT_EQ(received.at(4), 4 << 20);
  EXPECT_LE(plan.predicted_seconds, 2.2 * plan.lower_bound_seconds);
}

/// What is small or gains nothing stays a star.
TEST(Striped, SmallReductionsAndThoseOfOneContributionAreStars) {
  const auto numSums = [](int64_t num_elements, std::vector<int64_t> holders, int64_t needer) {
    const DType dtype = DType::parse("float32");
    const auto count = static_cast<int64_t>(holders.size());
    const TensorPair pair{{{num_elements}, dtype, Mesh({count}, std::move(holders)), {Placement::partial(ReduceOp::kSum)}},
                          {{num_elements}, dtype, Mesh({1}, {needer}), {Placement::replicate()}}};
    const ReshardingPlan plan = planResharding({pair}, Topology::uniform(5, 1), parseStrategy("striped"));
    return std::count_if(plan.messages.begin(), plan.messages.end(), [](const Message& m) { return m.payload == Payload::kPartialSum; });
  };
  EXPECT_EQ(numSums(4, {0, 1, 2, 3}, 4), 0);
  EXPECT_EQ(numSums(1 << 20, {0, 1}, 1), 0);
  EXPECT_GT(numSums(1 << 20, {0, 1, 2, 3}, 4), 0);
}

/// Shard and Replicate on ranks 0..15, disjoint, overlapping or identical, of a size that chunks can divide.
TensorPair largeRandomPair(std::mt19937_64& rng) {
  layouts::LayoutOptions options;
  options.num_ranks = 16;
  options.allow_partial = false;
  options.allow_zero_size = false;
  options.max_dims = 3;
  TensorPair pair = layouts::randomPair(rng, options);
  for (TensorSpec* spec : {&pair.src, &pair.dst}) {
    spec->dtype = DType::parse("float32");
    for (int64_t& extent : spec->shape) {
      extent *= 60;
    }
    if (spec->shape.empty()) {
      spec->shape = {200'000};
    }
  }
  return pair;
}

TEST(Striped, StaysNearTheBoundAndBelowBroadcast) {
  for (uint64_t seed = 0; seed < 120; ++seed) {
    std::mt19937_64 rng(seed);
    const TensorPair pair = largeRandomPair(rng);
    const double striped = ratioOf(pair, 2, "striped:num_chunks=64");
    EXPECT_LE(striped, 1.12) << "seed " << seed << " " << pair.src.str() << " -> " << pair.dst.str();
    EXPECT_LE(striped, 1.05 * ratioOf(pair, 2, "broadcast:num_chunks=64")) << "seed " << seed;
  }
}

TEST(Striped, StaysNearTheBoundWhereHostsHaveTheirOwnRates) {
  constexpr uint64_t kNumSeeds = 120;
  double total = 0;
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    std::mt19937_64 rng(seed);
    const TensorPair pair = largeRandomPair(rng);
    std::map<int64_t, int64_t> nic_of_host;
    for (int64_t host = 0; host < 8; ++host) {
      nic_of_host[host] = layouts::randomInt(rng, 10, 40) * 1'000'000;
    }
    const Topology topology(Topology::uniform(16, 2).hostOfRanks(), bytesOnly(), nic_of_host);
    const double striped = ratioOn(pair, topology, "striped:num_chunks=64");
    EXPECT_LE(striped, 1.3) << "seed " << seed << " " << pair.src.str() << " -> " << pair.dst.str();
    EXPECT_LE(striped, 1.05 * ratioOn(pair, topology, "broadcast:num_chunks=64")) << "seed " << seed;
    total += striped;
  }
  EXPECT_LE(total, 1.015 * kNumSeeds) << "on average";
}

/// Hosts 0 to 2 hold: one tensor is on host 0 alone, the others on more and more of them. Together the sends level; of each by itself, host 0 sends
/// an equal partial of all.
TEST(Striped, BalancesAListOfTensorsTogether) {
  const DType dtype = DType::parse("float32");
  const auto pairOf = [&](std::vector<int64_t> holders, int64_t needer) {
    const auto count = static_cast<int64_t>(holders.size());
    return TensorPair{{{1 << 20}, dtype, Mesh({count}, std::move(holders)), {Placement::replicate()}},
                      {{1 << 20}, dtype, Mesh({1}, {needer}), {Placement::replicate()}}};
  };
  const std::vector<TensorPair> tensors = {pairOf({0, 1, 2}, 6), pairOf({0, 1}, 4), pairOf({0}, 3), pairOf({1, 2}, 5)};
  const Topology topology = Topology::uniform(7, 1, bytesOnly());
  const Strategy striped = parseStrategy("striped:num_chunks=64");
  const ReshardingPlan plan = planResharding(tensors, topology, striped);
  validatePlan(plan);
  EXPECT_LE(plan.predicted_seconds, 1.05 * plan.lower_bound_seconds);
  int64_t sent_by_first = 0;
  double one_by_one_s = 0;
  for (const TensorPair& pair : tensors) {
    const ReshardingPlan alone = planResharding({pair}, topology, striped);
    const std::map<int64_t, int64_t> sent = alone.bytesSent();
    sent_by_first += sent.contains(0) ? sent.at(0) : 0;
    one_by_one_s += alone.predicted_seconds;
  }
  EXPECT_GE(static_cast<double>(sent_by_first), 1.3 * static_cast<double>(plan.lower_bound_bytes))
      << "its NIC alone takes longer than the joint plan";
  EXPECT_GE(one_by_one_s, 2 * plan.predicted_seconds);
}

TEST(WaterFill, ReachesTheLinearProgram) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 rng(seed);
    const int64_t num_hosts = layouts::randomInt(rng, 1, 8);
    std::vector<int64_t> rates;
    for (int64_t host = 0; host < num_hosts; ++host) {
      rates.push_back(layouts::randomInt(rng, 1, 4) * 1'000'000);
    }
    std::vector<SharedLoad> shared_loads;
    for (int64_t i = layouts::randomInt(rng, 1, 9); i > 0; --i) {
      const int64_t set = layouts::randomInt(rng, 1, (int64_t{1} << num_hosts) - 1);
      SharedLoad& shared = shared_loads.emplace_back();
      for (int32_t host = 0; host < num_hosts; ++host) {
        if ((set >> host & 1) != 0) {
          shared.hosts.push_back(host);
        }
      }
      shared.mass = layouts::randomInt(rng, 1, 1 << 30);
    }
    const FilledLoads filled = waterFill(shared_loads, rates, 0);
    for (size_t i = 0; i < shared_loads.size(); ++i) {
      EXPECT_NEAR(std::accumulate(filled.bytes[i].begin(), filled.bytes[i].end(), 0.0), static_cast<double>(shared_loads[i].mass), 1);
    }
    const double best = worstHostSet(shared_loads, rates, {0, 1}).seconds();
    EXPECT_LE(filled.largest_load_s, 1.001 * best) << "seed " << seed;
    EXPECT_GE(filled.largest_load_s, best * (1 - 1e-9)) << "seed " << seed;
  }
}

double bestByTrying(const std::vector<std::vector<double>>& weights, size_t row, std::vector<bool>& taken) {
  if (row == weights.size()) {
    return 0;
  }
  double best = bestByTrying(weights, row + 1, taken);
  for (size_t column = 0; column < weights[row].size(); ++column) {
    if (!taken[column] && weights[row][column] > 0) {
      taken[column] = true;
      best = std::max(best, weights[row][column] + bestByTrying(weights, row + 1, taken));
      taken[column] = false;
    }
  }
  return best;
}

TEST(PortMatching, IsTheHeaviest) {
  for (uint64_t seed = 0; seed < 500; ++seed) {
    std::mt19937_64 rng(seed);
    const int64_t num_columns = layouts::randomInt(rng, 1, 6);
    std::vector<std::vector<double>> weights(static_cast<size_t>(layouts::randomInt(rng, 1, 6)));
    for (std::vector<double>& row : weights) {
      for (int64_t column = 0; column < num_columns; ++column) {
        row.push_back(layouts::randomInt(rng, 0, 2) == 0 ? 0 : static_cast<double>(layouts::randomInt(rng, 1, 9)));
      }
    }
    double total = 0;
    std::vector<bool> taken(static_cast<size_t>(num_columns), false);
    const std::vector<int32_t> column_of = heaviestMatching(weights);
    for (size_t row = 0; row < weights.size(); ++row) {
      if (column_of[row] >= 0) {
        const auto column = static_cast<size_t>(column_of[row]);
        EXPECT_FALSE(taken[column]);
        taken[column] = true;
        EXPECT_GT(weights[row][column], 0);
        total += weights[row][column];
      }
    }
    taken.assign(static_cast<size_t>(num_columns), false);
    EXPECT_EQ(total, bestByTrying(weights, 0, taken)) << "seed " << seed;
  }
}

}  // namespace
}  // namespace xmesh::core
