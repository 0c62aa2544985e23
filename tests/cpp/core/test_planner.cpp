#include <gtest/gtest.h>

#include <string>

#include "core/error.h"
#include "core/resharding/host_sets.h"
#include "core/resharding/network.h"
#include "core/resharding/plan_resharding.h"
#include "core/resharding/simulate.h"
#include "core/resharding/strategy_registry.h"
#include "core/resharding/validate.h"
#include "element_oracle.h"
#include "published_cases.h"
#include "random_layouts.h"

namespace xmesh::core {
namespace {

std::string messageOf(const std::vector<TensorPair>& tensors, const Topology& topology) {
  try {
    planResharding(tensors, topology, parseStrategy("send_recv"));
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TensorPair simplePair() {
  const DType dtype = DType::parse("float32");
  return {{{8, 4}, dtype, Mesh({2}, {0, 1}), {Placement::shard(0)}}, {{8, 4}, dtype, Mesh({2}, {2, 3}), {Placement::shard(1)}}};
}

TEST(Planner, RefusesBadInputsNamingTheTensor) {
  const Topology topology = Topology::uniform(4, 2);
  TensorPair bad = simplePair();
  bad.dst.shape = {4, 8};
  EXPECT_NE(messageOf({simplePair(), bad}, topology).find("tensor 1: a reshard keeps the shape; the source has [8, 4], the destination [4, 8]"),
            std::string::npos);
  bad = simplePair();
  bad.dst.dtype = DType::parse("bfloat16");
  EXPECT_NE(messageOf({bad}, topology).find("the source has float32, the destination bfloat16"), std::string::npos);
  bad = simplePair();
  bad.dst.placements = {Placement::partial(ReduceOp::kSum)};
  EXPECT_NE(messageOf({bad}, topology).find("Partial placement"), std::string::npos);
  bad = simplePair();
  bad.src.placements = {Placement::shard(2)};
  EXPECT_NE(messageOf({bad}, topology).find("tensor 0: source"), std::string::npos);
  EXPECT_NE(messageOf({simplePair()}, Topology::uniform(3, 2)).find("rank 3"), std::string::npos);
}

TEST(Planner, NothingMovesWhereEveryRankHasWhatItNeeds) {
  TensorPair pair = simplePair();
  pair.dst = pair.src;
  for (const StrategyInfo& info : strategies()) {
    const ReshardingPlan plan = planResharding({pair}, Topology::uniform(4, 2), parseStrategy(info.name));
    EXPECT_TRUE(plan.messages.empty()) << info.name;
    EXPECT_EQ(plan.lower_bound_bytes, 0);
    EXPECT_EQ(plan.predicted_seconds, 0);
  }
}

TEST(Planner, PastFourGiB) {
  TensorPair pair = simplePair();
  pair.src.shape = pair.dst.shape = {int64_t{1} << 17, int64_t{1} << 14};  // 8 GiB
  for (const StrategyInfo& info : strategies()) {
    const ReshardingPlan plan = planResharding({pair}, Topology::uniform(4, 2), parseStrategy(info.name));
    EXPECT_NO_THROW(validatePlan(plan)) << info.name;
    EXPECT_EQ(plan.lower_bound_bytes, int64_t{8} << 30);
    EXPECT_EQ(plan.bytesReceived().at(1), int64_t{8} << 30);
  }
}

TEST(Planner, AutoIsAsFastAsTheFastestCandidate) {
  for (const layouts::PublishedCase& published : layouts::publishedCases()) {
    const auto tensors = std::vector{layouts::pairOf(published)};
    const ReshardingPlan chosen = planResharding(tensors, layouts::topologyOf(published), parseStrategy("auto"));
    for (const StrategyInfo& info : strategies()) {
      if (info.is_candidate == nullptr || !info.is_candidate(chosen, Network(chosen))) {
        continue;
      }
      const ReshardingPlan plan = planResharding(tensors, layouts::topologyOf(published), parseStrategy(info.name));
      EXPECT_LE(chosen.predicted_seconds, plan.predicted_seconds / 0.99) << published.name << " " << info.name;
    }
    EXPECT_EQ(chosen.messages, planResharding(tensors, layouts::topologyOf(published), parseStrategy(chosen.strategy)).messages) << published.name;
  }
}

TEST(Planner, AutoTakesFewerStreamsWherePredictionsAreATie) {
  // Host 0 to hosts 1-4: down a chain, or a part to each, which they exchange.
  const DType dtype = DType::parse("float32");
  const TensorPair pair{{{4096, 4096}, dtype, Mesh({1}, {0}), {Placement::replicate()}},
                        {{4096, 4096}, dtype, Mesh({8}, {4, 5, 8, 9, 12, 13, 16, 17}), {Placement::replicate()}}};
  LinkModel links;
  links.nic_bytes_per_s = 50'000'000;
  const Topology topology = Topology::uniform(20, 4, links);
  const double striped = planResharding({pair}, topology, parseStrategy("striped")).predicted_seconds;
  const ReshardingPlan broadcast = planResharding({pair}, topology, parseStrategy("broadcast"));
  ASSERT_LT(striped, broadcast.predicted_seconds) << "else the rule is not what is seen";
  ASSERT_LT(broadcast.predicted_seconds, striped / 0.99);
  EXPECT_EQ(planResharding({pair}, topology, parseStrategy("auto")).messages, broadcast.messages);
}

TEST(Planner, AutoDividesALargeSumAmongTheRanksOfOneHost) {
  const DType dtype = DType::parse("float32");
  const auto sumOf = [&](int64_t num_elements, const std::vector<int64_t>& ranks, const Placement& to) {
    const Mesh mesh({static_cast<int64_t>(ranks.size())}, ranks);
    return std::vector{TensorPair{{{num_elements}, dtype, mesh, {Placement::partial(ReduceOp::kSum)}}, {{num_elements}, dtype, mesh, {to}}}};
  };
  const auto sentBy = [](const ReshardingPlan& plan, int32_t rank) {
    int64_t num_bytes = 0;
    for (const Message& message : plan.messages) {
      num_bytes += message.src_rank == rank ? 4 * (message.end - message.begin) : 0;
    }
    return num_bytes;
  };
  const Topology topology = Topology::uniform(8, 4);
  const int64_t num_elements = int64_t{1} << 22;
  const ReshardingPlan large = planResharding(sumOf(num_elements, {0, 1, 2, 3}, Placement::replicate()), topology, parseStrategy("auto"));
  EXPECT_NO_THROW(validatePlan(large));
  for (int32_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(sentBy(large, rank), 4 * num_elements * 2 * 3 / 4) << "as a reduce-scatter and an all-gather send";
  }
  const ReshardingPlan small = planResharding(sumOf(64, {0, 1, 2, 3}, Placement::replicate()), topology, parseStrategy("auto"));
  EXPECT_EQ(small.strategy, "send_recv") << "one latency";
  const StrategyInfo& divided = strategyInfo("local_allgather");
  EXPECT_TRUE(divided.is_candidate(large, Network(large)));
  const auto isCandidate = [&](const std::vector<TensorPair>& tensors) {
    const ReshardingPlan plan = planResharding(tensors, topology, parseStrategy("auto"));
    return divided.is_candidate(plan, Network(plan));
  };
  EXPECT_FALSE(isCandidate(sumOf(64, {0, 1, 2, 3}, Placement::shard(0)))) << "each has a part of its own";
  EXPECT_FALSE(isCandidate(sumOf(64, {0, 1, 4, 5}, Placement::replicate()))) << "on two hosts";
  // Two hosts, each with a sum of its own.
  const Mesh mesh({2, 4}, {0, 1, 2, 3, 4, 5, 6, 7});
  const TensorPair apart{{{num_elements}, dtype, mesh, {Placement::shard(0), Placement::partial(ReduceOp::kSum)}},
                         {{num_elements}, dtype, mesh, {Placement::shard(0), Placement::replicate()}}};
  EXPECT_TRUE(isCandidate({apart}));
  EXPECT_EQ(sentBy(planResharding({apart}, topology, parseStrategy("auto")), 5), 4 * num_elements / 2 * 2 * 3 / 4);
}

TEST(Planner, PublishedCasesDecomposeAndBroadcastReceivesOnce) {
  for (const layouts::PublishedCase& published : layouts::publishedCases()) {
    const TensorPair pair = layouts::pairOf(published);
    const ReshardingPlan plan = planResharding({pair}, layouts::topologyOf(published), parseStrategy("broadcast"));
    EXPECT_EQ(static_cast<int64_t>(plan.tasks.size()), published.num_tasks) << published.name;
    EXPECT_NO_THROW(validatePlan(plan)) << published.name;
    const int64_t num_dst_hosts = pair.dst.mesh.numRanks() / 4;
    const bool is_replicated = published.dst[0] == Placement::replicate();
    for (const auto& [host, bytes] : plan.bytesReceived()) {
      const bool is_dst = host >= pair.src.mesh.numRanks() / 4;
      EXPECT_EQ(bytes, !is_dst ? 0 : pair.src.numBytes() / (is_replicated ? 1 : num_dst_hosts)) << published.name << " host " << host;
    }
  }
}

/// Every strategy on random layouts against the element-wise oracle; several tensors per plan now and then.
class RandomLayouts : public ::testing::TestWithParam<std::string> {};

TEST_P(RandomLayouts, EveryElementArrivesOnce) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr uint64_t kLayouts = 500;  // an order of magnitude slower there
#else
  constexpr uint64_t kLayouts = 5000;
#endif
  for (uint64_t seed = 0; seed < kLayouts; ++seed) {
    std::mt19937_64 rng(seed);
    layouts::LayoutOptions options;
    options.max_elements = 256;
    std::vector<TensorPair> tensors;
    for (int64_t i = layouts::randomInt(rng, 0, 7) == 0 ? 3 : 1; i > 0; --i) {
      tensors.push_back(layouts::randomPair(rng, options));
    }
    const ReshardingPlan plan = planResharding(tensors, layouts::randomTopology(rng, options.num_ranks), parseStrategy(GetParam()));
    ASSERT_EQ(layouts::ElementOracle::check(plan), "") << "seed " << seed << " " << tensors[0].src.str() << " -> " << tensors[0].dst.str();
    ASSERT_NO_THROW(validatePlan(plan)) << "seed " << seed;
    ASSERT_LE(plan.lower_bound_seconds, plan.predicted_seconds * (1 + 1e-9)) << "seed " << seed;
    int64_t busiest = 0;
    for (const std::map<int64_t, int64_t>& bytes : {plan.bytesSent(), plan.bytesReceived()}) {
      for (const auto& [host, carried] : bytes) {
        busiest = std::max(busiest, carried);
      }
    }
    ASSERT_LE(plan.lower_bound_bytes, busiest) << "seed " << seed;
  }
}

std::string testName(const ::testing::TestParamInfo<std::string>& info) {
  std::string out;
  for (char c : info.param) {
    out += std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  }
  return out;
}

INSTANTIATE_TEST_SUITE_P(Strategies, RandomLayouts,
                         ::testing::Values("send_recv", "broadcast", "broadcast:naive+naive", "broadcast:size+greedy,seed=7", "broadcast:naive+dfs",
                                           "broadcast:num_chunks=5", "local_allgather", "global_allgather", "alpa", "striped", "striped:num_chunks=7",
                                           "auto"),
                         testName);

TEST(Planner, BroadcastBringsAHostEachByteOnce) {
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    std::mt19937_64 rng(seed);
    layouts::LayoutOptions options;
    options.allow_partial = false;
    const TensorPair pair = layouts::randomPair(rng, options);
    const ReshardingPlan plan = planResharding({pair}, layouts::randomTopology(rng, options.num_ranks), parseStrategy("broadcast"));
    const Network network(plan);
    const HostSets hosts(plan, network);
    std::map<int64_t, int64_t> demand;
    for (const UnitTask& task : plan.tasks) {
      const std::vector<int32_t>& holders = hosts.holders[static_cast<size_t>(task.holders)].front();
      for (int32_t host : hosts.needers[static_cast<size_t>(task.needers)]) {
        if (std::find(holders.begin(), holders.end(), host) == holders.end()) {
          demand[network.hostNumber(host)] += numElements(task.box) * plan.itemBytes(task);
        }
      }
    }
    for (const auto& [host, bytes] : plan.bytesReceived()) {
      ASSERT_EQ(bytes, demand[host]) << "seed " << seed << " host " << host;
    }
  }
}

}  // namespace
}  // namespace xmesh::core
