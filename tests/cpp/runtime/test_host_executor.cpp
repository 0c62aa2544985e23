#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "runtime/host_run.h"
#include "runtime/manual_transport.h"
#include "runtime/one_rank.h"
#include "runtime/plans.h"
#include "runtime/random_plan.h"
#include "runtime/stream_run.h"

namespace xmesh::replay {
namespace {

using core::Placement;
using runtime::compileProgram;
using runtime::HostExecutor;
using runtime::LocalTensor;
using runtime::StagingPool;

TEST(HostExecutor, ForwardsEachChunkInPlaceAsSoonAsItIsThere) {
  std::vector<float> out(10);
  OneRank rank(chainPlan(10, 5, 2), 1, {{}}, {{out.data(), {10}, {1}}});
  rank.executor->start();
  ASSERT_EQ(rank.transport.receives.size(), 2U) << "all receives are posted ahead";
  EXPECT_EQ(rank.transport.receives[1].data, out.data() + 5) << "in place";
  EXPECT_TRUE(rank.transport.sends.empty());
  rank.transport.events->onReceived(0);
  ASSERT_EQ(rank.transport.sends.size(), 1U);
  EXPECT_EQ(rank.transport.sends[0].data, out.data());
  EXPECT_EQ(rank.transport.sends[0].peer, 2);
  rank.transport.events->onReceived(1);
  rank.transport.events->onSent(0);
  EXPECT_EQ(describeProgress(rank.executor->progress()), "sent 1 of 2 messages to rank 2");
  EXPECT_EQ(waitingFor(rank.executor->progress()), std::vector<int64_t>{2});
  rank.transport.events->onSent(1);
  EXPECT_EQ(rank.num_done, 1);
  EXPECT_TRUE(rank.executor->isDone());
  EXPECT_EQ(rank.transport.events, nullptr) << "the operation is closed";
  EXPECT_EQ(describeProgress(rank.executor->progress()), "");
  EXPECT_EQ(rank.pool.peakBytes(), 0);
}

/// Rank 0 holds all, sends half to rank 1 and keeps the other half.
TEST(HostExecutor, SendsBeforeItMayWrite) {
  std::vector<float> in(10, 7.0F);
  std::vector<float> out(5, -1.0F);
  core::ReshardingPlan plan =
      emptyPlan({{lineSpec({10}, "float32", {0}, Placement::replicate()), lineSpec({10}, "float32", {0, 1}, Placement::shard(0))}});
  plan.messages.push_back(valueMessage(1, 0, 5, 0, 1));
  OneRank rank(plan, 0, {{in.data(), {10}, {1}}}, {{out.data(), {5}, {1}}});
  rank.executor->start(false);
  ASSERT_EQ(rank.transport.sends.size(), 1U);
  rank.transport.events->onSent(0);
  EXPECT_EQ(out, std::vector<float>(5, -1.0F));
  EXPECT_EQ(rank.num_done, 0);
  rank.executor->allowWrites();
  EXPECT_EQ(out, std::vector<float>(5, 7.0F));
  EXPECT_EQ(rank.num_done, 1);
  rank.executor->allowWrites();
  EXPECT_EQ(rank.num_done, 1);
}

TEST(HostExecutor, ReceivesOnceItMayWrite) {
  std::vector<float> out(10);
  OneRank rank(chainPlan(10, 5, 2), 1, {{}}, {{out.data(), {10}, {1}}});
  rank.executor->start(false);
  EXPECT_TRUE(rank.transport.receives.empty());
  rank.executor->allowWrites();
  ASSERT_EQ(rank.transport.receives.size(), 2U);
  rank.transport.events->onReceived(0);
  EXPECT_EQ(rank.transport.sends.size(), 1U);
}

TEST(HostExecutor, BearsToBeCanceledBeforeItMayWrite) {
  std::vector<float> out(10);
  OneRank rank(chainPlan(10, 5, 2), 1, {{}}, {{out.data(), {10}, {1}}});
  rank.executor->start(false);
  rank.executor->cancel();
  rank.executor->allowWrites();
  EXPECT_TRUE(rank.transport.receives.empty());
  EXPECT_EQ(rank.num_done, 0);
}

TEST(HostExecutor, SaysWhatIsMissing) {
  std::vector<float> out(10);
  OneRank rank(chainPlan(10, 5, 2), 1, {{}}, {{out.data(), {10}, {1}}});
  rank.executor->start();
  rank.transport.events->onReceived(0);
  EXPECT_EQ(describeProgress(rank.executor->progress()), "received 1 of 2 messages from rank 0, sent 0 of 2 messages to rank 2");
  EXPECT_EQ(waitingFor(rank.executor->progress()), (std::vector<int64_t>{0, 2}));
}

TEST(HostExecutor, BearsCallbacksFromInsideSend) {
  std::vector<float> in(1000);
  OneRank rank(transposePlan(10, 100, 1, 5), 0, {{in.data(), {10, 100}, {100, 1}}}, {{}}, 64);
  rank.transport.completes_sends_inside = true;
  rank.executor->start();
  EXPECT_EQ(rank.transport.sends.size(), 5U);
  EXPECT_EQ(rank.num_done, 1);
  EXPECT_EQ(rank.pool.bytesInUse(), 0);
}

TEST(HostExecutor, IsDoneAtOnceWithoutWork) {
  OneRank rank(chainPlan(10, 5, 2), 9, {{}}, {{}});
  rank.executor->start();
  EXPECT_EQ(rank.num_done, 1);
}

TEST(HostExecutor, MayBeDestroyedWhenDone) {
  std::vector<float> out(10);
  const core::ReshardingPlan plan = chainPlan(10, 10, 1);
  ManualTransport transport;
  StagingPool pool(1 << 20);
  std::unique_ptr<HostExecutor> executor;
  executor = std::make_unique<HostExecutor>(compileProgram(plan, 1), transport, 1, std::vector<int32_t>{0}, std::vector<LocalTensor>{{}},
                                            std::vector<LocalTensor>{{out.data(), {10}, {1}}}, pool, [&executor] { executor.reset(); });
  executor->start();
  transport.events->onReceived(0);
  EXPECT_EQ(executor, nullptr);
}

core::ReshardingPlan copyPlan(int64_t num_elements) {
  return emptyPlan({{lineSpec({num_elements}, "uint8", {0}, Placement::replicate()), lineSpec({num_elements}, "uint8", {0}, Placement::shard(0))}});
}

TEST(HostExecutor, CopiesInSlices) {
  constexpr int64_t kBytes = int64_t{5} << 20;
  std::vector<uint8_t> in(kBytes, 7);
  std::vector<uint8_t> out(kBytes, 0);
  OneRank rank(copyPlan(kBytes), 0, {{in.data(), {kBytes}, {1}}}, {{out.data(), {kBytes}, {1}}});
  rank.executor->start();
  int num_tasks = 0;
  while (!rank.transport.tasks.empty()) {
    EXPECT_EQ(rank.num_done, 0);
    rank.transport.runTask();
    ++num_tasks;
  }
  EXPECT_EQ(num_tasks, 4);
  EXPECT_EQ(rank.num_done, 1);
  EXPECT_EQ(in, out);
}

TEST(HostExecutor, CancelStopsItsCopies) {
  constexpr int64_t kBytes = int64_t{3} << 20;
  auto memory = std::make_unique<std::vector<uint8_t>>(kBytes, 7);
  std::vector<uint8_t> out(kBytes, 0);
  OneRank rank(copyPlan(kBytes), 0, {{memory->data(), {kBytes}, {1}}}, {{out.data(), {kBytes}, {1}}});
  rank.executor->start();
  rank.executor->cancel();
  memory.reset();
  rank.executor.reset();
  rank.transport.runTask();
  EXPECT_EQ(rank.num_done, 0);
}

TEST(HostExecutor, RefusesWrongShapes) {
  std::vector<float> out(10);
  EXPECT_THROW(OneRank(chainPlan(10, 5, 2), 1, {{}}, {{out.data(), {9}, {1}}}), core::InvalidArgument);
}

TEST(HostExecutor, KeepsStagingInsideTheBound) {
  const core::ReshardingPlan plan = transposePlan(512, 512, 2, 2);
  constexpr int64_t kBound = 64 << 10;
  HostRanks ranks(4, 3, kBound);
  HostOperation operation(ranks, plan, 1, MemoryLayout::kRandom, 4, {kBound / 8});
  operation.start();
  ranks.network().runUntilIdle();
  ASSERT_TRUE(operation.isDone()) << operation.progress();
  EXPECT_EQ(operation.firstDifference(), "");
  for (int64_t rank = 0; rank < 4; ++rank) {
    EXPECT_LE(ranks.pool(rank).peakBytes(), kBound);
  }
}

/// Partial over ranks 0, 1, 2, reduced at rank 1 and, from there, at ranks 2 and 3; ranges are longer than any buffer on the way.
core::ReshardingPlan longReduction(const char* dtype, core::ReduceOp op) {
  constexpr int64_t kElements = 50 * 113;
  core::ReshardingPlan plan =
      emptyPlan({{lineSpec({50, 113}, dtype, {0, 1, 2}, Placement::partial(op)), lineSpec({50, 113}, dtype, {1, 2, 3}, Placement::replicate())}});
  plan.messages = {contributionMessage(0, 0, kElements, 2, 1, 2), contributionMessage(0, 0, kElements, 0, 1, 0), valueMessage(0, 0, 3000, 1, 3),
                   valueMessage(0, 3000, kElements, 1, 3), valueMessage(0, 0, kElements, 3, 2)};
  return plan;
}

TEST(HostExecutor, ReducesLongStridedRanges) {
  for (const char* dtype : {"float32", "bfloat16", "float16", "complex128"}) {
    const core::ReshardingPlan plan = longReduction(dtype, core::ReduceOp::kAvg);
    for (MemoryLayout layout : {MemoryLayout::kContiguous, MemoryLayout::kRandom}) {
      HostRanks ranks(4, 3, 1 << 20);
      HostOperation operation(ranks, plan, 1, layout, 4);
      operation.start();
      ranks.network().runUntilIdle();
      ASSERT_TRUE(operation.isDone()) << operation.progress();
      EXPECT_EQ(operation.firstDifference(), "");
      EXPECT_EQ(runOnStreams(plan, layout, 5, 1 << 20), "");
    }
  }
}

/// Partial over ranks 0 to 3, added up on the way to rank 4 in chunks of 500 elements, then to rank 1; heads of the chain take turns.
core::ReshardingPlan chainOfSums(const char* dtype, core::ReduceOp op) {
  constexpr int64_t kElements = 60 * 100;
  core::ReshardingPlan plan =
      emptyPlan({{lineSpec({60, 100}, dtype, {0, 1, 2, 3}, Placement::partial(op)), lineSpec({60, 100}, dtype, {1, 4}, Placement::replicate())}});
  std::vector<core::Message> values;
  for (int64_t begin = 0; begin < kElements; begin += 500) {
    const auto rank = [&](int64_t k) { return static_cast<int32_t>((begin / 500 + k) % 4); };
    plan.messages.push_back(contributionMessage(0, begin, begin + 500, rank(0), rank(1), rank(0)));
    plan.messages.push_back(sumMessage(0, begin, begin + 500, rank(1), rank(2)));
    plan.messages.push_back(sumMessage(0, begin, begin + 500, rank(2), rank(3)));
    plan.messages.push_back(sumMessage(0, begin, begin + 500, rank(3), 4));
    values.push_back(valueMessage(0, begin, begin + 500, 4, 1));
  }
  plan.messages.insert(plan.messages.end(), values.begin(), values.end());
  return plan;
}

TEST(HostExecutor, PassesSumsOnInsideTheStagingBound) {
  using core::ReduceOp;
  const std::vector<std::pair<const char*, ReduceOp>> cases = {
      {"int32", ReduceOp::kSum},   {"uint8", ReduceOp::kProduct}, {"float32", ReduceOp::kAvg}, {"bfloat16", ReduceOp::kAvg},
      {"float16", ReduceOp::kSum}, {"bfloat16", ReduceOp::kMax},  {"float64", ReduceOp::kMin}, {"float32", ReduceOp::kProduct}};
  constexpr int64_t kBound = 4096;
  for (const auto& [dtype, op] : cases) {
    const core::ReshardingPlan plan = chainOfSums(dtype, op);
    for (MemoryLayout layout : {MemoryLayout::kContiguous, MemoryLayout::kRandom}) {
      HostRanks ranks(5, 3, kBound);
      HostOperation operation(ranks, plan, 1, layout, 4, {kBound / 8});
      operation.start();
      ranks.network().runUntilIdle();
      ASSERT_TRUE(operation.isDone()) << operation.progress();
      EXPECT_EQ(operation.firstDifference(), "");
      for (int64_t rank = 0; rank < 5; ++rank) {
        EXPECT_LE(ranks.pool(rank).peakBytes(), kBound) << rank;
        EXPECT_EQ(ranks.pool(rank).bytesInUse(), 0);
      }
      EXPECT_EQ(runOnStreams(plan, layout, 5, kBound, {kBound / 8}), "");
      EXPECT_EQ(runOnStreams(plan, layout, 6, 1 << 20), "");
    }
  }
}

TEST(HostExecutor, KeepsASumUntilItIsSent) {
  std::vector<int32_t> own(6000, 1);
  core::ReshardingPlan plan = chainOfSums("int32", core::ReduceOp::kSum);
  OneRank rank(plan, 2, {{own.data(), {60, 100}, {100, 1}}}, {{}}, 4 * 2000);
  rank.executor->start();
  const size_t num_posted = rank.transport.receives.size();
  ASSERT_EQ(num_posted, 1U) << "an accumulator takes a quarter of the bound";
  const size_t num_sent = rank.transport.sends.size();
  rank.transport.events->onReceived(rank.transport.receives[0].cookie);
  ASSERT_EQ(rank.transport.sends.size(), num_sent + 1);
  EXPECT_EQ(rank.transport.receives.size(), num_posted) << "the sum is still there";
  rank.transport.events->onSent(rank.transport.sends.back().cookie);
  EXPECT_EQ(rank.transport.receives.size(), num_posted + 1);
}

/// Several random operations over the same ranks, started in another order on every rank, with hardly any staging memory.
class ManyOperations {
 public:
  explicit ManyOperations(uint64_t seed) : rng_(mix(seed)), ranks_(kNumRanks, rng_(), 256) {
    for (size_t i = 0; i < kNumOperations; ++i) {
      layouts::LayoutOptions options;
      options.num_ranks = kNumRanks;
      core::TensorPair pair = layouts::randomPair(rng_, options);
      drawDType(rng_, pair);
      plans_.push_back(std::make_unique<core::ReshardingPlan>(RandomPlanner({pair}, core::Topology::uniform(kNumRanks, 2), rng_).plan()));
      operations_.push_back(
          std::make_unique<HostOperation>(ranks_, *plans_.back(), i + 1, MemoryLayout::kRandom, rng_(), runtime::ProgramOptions{64}));
    }
    std::vector<int64_t> starts;
    for (size_t i = 0; i < kNumOperations; ++i) {
      starts.insert(starts.end(), operations_[i]->numRanks(), static_cast<int64_t>(i));
    }
    layouts::shuffleRanks(rng_, starts);
    std::vector<size_t> next(kNumOperations, 0);
    for (int64_t operation : starts) {
      const auto i = static_cast<size_t>(operation);
      operations_[i]->executor(next[i]++).start();
    }
  }

  std::mt19937_64& rng() { return rng_; }
  HostRanks& ranks() { return ranks_; }
  std::vector<std::unique_ptr<HostOperation>>& operations() { return operations_; }
  int64_t bytesInUse() {
    int64_t bytes = 0;
    for (int64_t rank = 0; rank < kNumRanks; ++rank) {
      bytes += ranks_.pool(rank).bytesInUse();
    }
    return bytes;
  }

 private:
  static constexpr int64_t kNumRanks = 6;
  static constexpr size_t kNumOperations = 6;
  std::mt19937_64 rng_;
  HostRanks ranks_;
  std::vector<std::unique_ptr<core::ReshardingPlan>> plans_;
  std::vector<std::unique_ptr<HostOperation>> operations_;
};

TEST(HostExecutor, RunsSeveralOperationsAtOnceInAnyOrder) {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    ManyOperations many(seed);
    many.ranks().network().runUntilIdle();
    for (auto& operation : many.operations()) {
      ASSERT_TRUE(operation->isDone()) << "seed " << seed << "\n" << operation->progress();
      ASSERT_EQ(operation->firstDifference(), "") << "seed " << seed;
    }
    ASSERT_EQ(many.bytesInUse(), 0);
  }
}

TEST(HostExecutor, CancelInTheMiddleLeavesTheOthersAlone) {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    ManyOperations many(1000 + seed);
    const int64_t num_steps = randomInt(many.rng(), 0, 300);
    for (int64_t step = 0; step < num_steps && many.ranks().network().step(); ++step) {
    }
    // Operation 0 is given up on every rank, at different times; then its memory is gone, so that ASan sees whoever still uses it.
    std::unique_ptr<HostOperation>& victim = many.operations()[0];
    for (size_t i = 0; i < victim->numRanks(); ++i) {
      for (int64_t step = randomInt(many.rng(), 0, 20); step > 0 && many.ranks().network().step(); --step) {
      }
      victim->executor(i).cancel();
    }
    victim.reset();
    many.ranks().network().runUntilIdle();
    for (size_t i = 1; i < many.operations().size(); ++i) {
      ASSERT_TRUE(many.operations()[i]->isDone()) << "seed " << seed << "\n" << many.operations()[i]->progress();
      ASSERT_EQ(many.operations()[i]->firstDifference(), "") << "seed " << seed;
    }
    ASSERT_EQ(many.bytesInUse(), 0);
  }
}

}  // namespace
}  // namespace xmesh::replay
