#include <gtest/gtest.h>

#include <algorithm>
#include <exception>
#include <random>
#include <string>

#include "core/resharding/plan_resharding.h"
#include "core/resharding/strategy_registry.h"
#include "random_layouts.h"
#include "runtime/host_run.h"
#include "runtime/random_plan.h"
#include "runtime/stream_run.h"

namespace xmesh::replay {

using layouts::LayoutOptions;
using layouts::randomPair;
using layouts::randomTopology;
namespace {

std::vector<core::TensorPair> randomTensors(std::mt19937_64& rng, int64_t round) {
  LayoutOptions options;
  options.num_ranks = randomInt(rng, 2, 10);
  options.max_elements = round % 50 == 0 ? 4096 : 200;
  options.max_extent = round % 50 == 0 ? 40 : 9;
  std::vector<core::TensorPair> tensors;
  const int64_t num_tensors = randomInt(rng, 0, 4) == 0 ? 3 : 1;
  for (int64_t i = 0; i < num_tensors; ++i) {
    tensors.push_back(randomPair(rng, options));
    drawDType(rng, tensors.back());
    if (randomInt(rng, 0, 2) == 0) {
      layouts::drawBoxes(rng, tensors.back());
    }
  }
  return tensors;
}

/// A bound and a message size: generous, or so small that nearly every message waits for memory.
struct Limits {
  int64_t staging_bytes = int64_t{64} << 20;
  runtime::ProgramOptions program;
};

Limits randomLimits(std::mt19937_64& rng) {
  Limits limits;
  if (randomInt(rng, 0, 1) == 0) {
    limits.staging_bytes = randomInt(rng, 1, 4096);
    limits.program.max_message_bytes = randomInt(rng, 1, 256);
  }
  return limits;
}

MemoryLayout randomLayout(std::mt19937_64& rng) { return randomInt(rng, 0, 1) == 0 ? MemoryLayout::kContiguous : MemoryLayout::kRandom; }

/// Any ranks, often none: those which may not write at once.
std::vector<size_t> someOf(size_t num_ranks, std::mt19937_64& rng) {
  std::vector<size_t> out;
  const int64_t least = randomInt(rng, 0, 3);
  for (size_t i = 0; i < num_ranks; ++i) {
    if (randomInt(rng, 0, 2) > least) {
      out.push_back(i);
    }
  }
  std::shuffle(out.begin(), out.end(), rng);
  return out;
}

void checkOnHosts(const core::ReshardingPlan& plan, std::mt19937_64& rng) {
  const Limits limits = randomLimits(rng);
  HostRanks ranks(plan.topology.hostOfRanks().rbegin()->first + 1, rng(), limits.staging_bytes);
  HostOperation operation(ranks, plan, 1, randomLayout(rng), rng(), limits.program);
  const std::vector<size_t> later = someOf(operation.numRanks(), rng);
  for (size_t i = 0; i < operation.numRanks(); ++i) {
    operation.startOne(i, std::find(later.begin(), later.end(), i) == later.end());
  }
  ranks.network().runUntilIdle();
  ASSERT_TRUE(std::all_of(later.begin(), later.end(), [&](size_t i) { return operation.isUntouched(i); }));
  for (const size_t i : later) {
    operation.allowWrites(i);
    if (randomInt(rng, 0, 1) == 0) {
      ranks.network().runUntilIdle();
    }
  }
  ranks.network().runUntilIdle();
  ASSERT_TRUE(operation.isDone()) << operation.progress();
  ASSERT_EQ(operation.firstDifference(), "");
  for (int64_t rank : plan.participants()) {
    ASSERT_EQ(ranks.pool(rank).bytesInUse(), 0);
  }
}

void checkOnStreams(const core::ReshardingPlan& plan, std::mt19937_64& rng) {
  Limits limits = randomLimits(rng);
  const MemoryLayout layout = randomLayout(rng);
  const uint64_t seed = rng();
  limits.program.groups = runtime::GroupLimits{limits.staging_bytes, randomInt(rng, 0, 1) * randomInt(rng, 0, 1024)};
  ASSERT_EQ(runOnStreams(plan, layout, seed, limits.staging_bytes, limits.program), "");
  runtime::ProgramOptions in_broadcasts = limits.program;
  in_broadcasts.broadcasts = true;
  ASSERT_EQ(runOnStreams(plan, layout, seed, limits.staging_bytes, in_broadcasts), "") << "in broadcasts";
}

std::mt19937_64 rngOfRound(uint64_t salt, int64_t round) { return std::mt19937_64(mix(salt + static_cast<uint64_t>(round))); }

/// Fewer where each takes ten times as long, and every path has been gone long before.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int64_t kRounds = 500;
#else
constexpr int64_t kRounds = 2500;
#endif

TEST(RandomReshards, HostilePlansOnBothFakes) {
  for (int64_t round = 0; round < kRounds; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    std::mt19937_64 rng = rngOfRound(1000000, round);
    std::vector<core::TensorPair> tensors = randomTensors(rng, round);
    const core::ReshardingPlan plan = RandomPlanner(std::move(tensors), randomTopology(rng, 10), rng).plan();
    ASSERT_NO_FATAL_FAILURE(checkOnHosts(plan, rng));
    ASSERT_NO_FATAL_FAILURE(checkOnStreams(plan, rng));
  }
}

/// Every layout by every strategy, in turns on the one fake and the other.
TEST(RandomReshards, EveryStrategyOnBothFakes) {
  for (int64_t round = 0; round < 2 * kRounds; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    std::mt19937_64 rng = rngOfRound(5000000, round);
    const std::vector<core::TensorPair> tensors = randomTensors(rng, round);
    const core::Topology topology = randomTopology(rng, 10);
    int64_t turn = round;
    for (const core::StrategyInfo& info : core::strategies()) {
      const core::ReshardingPlan plan = core::planResharding(tensors, topology, core::parseStrategy(info.name));
      if (turn++ % 2 == 0) {
        ASSERT_NO_FATAL_FAILURE(checkOnHosts(plan, rng));
      } else {
        ASSERT_NO_FATAL_FAILURE(checkOnStreams(plan, rng));
      }
    }
  }
}

}  // namespace
}  // namespace xmesh::replay
