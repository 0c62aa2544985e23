#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "core/error.h"
#include "runtime/plans.h"
#include "runtime/stream_run.h"

namespace xmesh::replay {
namespace {

using runtime::StreamExecutor;

/// An executor of one rank of a plan on memory of its own.
struct OneStream {
  OneStream(const core::ReshardingPlan& plan, int64_t rank, int64_t staging_bytes, int64_t joined_bytes = 0)
      : network(static_cast<int32_t>(plan.participants().back()) + 1), data(plan, plan.participants().back() + 1, MemoryLayout::kContiguous, 1) {
    auto program = runtime::compileProgram(plan, rank, {.groups = runtime::GroupLimits{staging_bytes, joined_bytes}});
    std::vector<int32_t> peers = sameRanks(*program);
    executor = std::make_unique<StreamExecutor>(std::move(program), network.transport(static_cast<int32_t>(rank)), std::move(peers), data.src(rank),
                                                data.dst(rank), kernels);
  }
  transport::FakeStreamNetwork network;
  ReshardCase data;
  runtime::HostKernels kernels;
  std::unique_ptr<StreamExecutor> executor;
};

TEST(StreamExecutor, SendsWhatItReceivedOneGroupLater) {
  const core::ReshardingPlan plan = chainPlan(12, 3, 2);
  EXPECT_EQ(OneStream(plan, 0, 1 << 20).executor->numGroups(), 4) << "no two chunks that go the same way share a group";
  const OneStream relay(plan, 1, 1 << 20);
  EXPECT_EQ(relay.executor->numGroups(), 5) << "receives chunk k + 1 together with sending chunk k";
  EXPECT_EQ(relay.executor->stagingBytes(), 0);
}

TEST(StreamExecutor, CutsGroupsToTheStagingBound) {
  const core::ReshardingPlan plan = transposePlan(16, 56, 1, 7);
  const OneStream wide(plan, 0, 1 << 20);
  EXPECT_EQ(wide.executor->numGroups(), 1);
  EXPECT_EQ(wide.executor->stagingBytes(), 16 * 56 * 4);
  const OneStream narrow(plan, 0, 1024);
  EXPECT_EQ(narrow.executor->numGroups(), 4);
  EXPECT_EQ(narrow.executor->stagingBytes(), 1024);
  const OneStream tiny(plan, 0, 1);
  EXPECT_EQ(tiny.executor->numGroups(), 7) << "one message always fits";
}

TEST(StreamExecutor, AllToAllOfManyRanksIsOneGroup) { EXPECT_EQ(OneStream(transposePlan(32, 32, 16, 16), 3, 1 << 20).executor->numGroups(), 1); }

TEST(StreamExecutor, NeedsGroups) {
  const core::ReshardingPlan plan = chainPlan(12, 3, 2);
  transport::FakeStreamNetwork network(3);
  ReshardCase data(plan, 3, MemoryLayout::kContiguous, 1);
  const runtime::HostKernels kernels;
  auto program = runtime::compileProgram(plan, 0);
  std::vector<int32_t> peers = sameRanks(*program);
  EXPECT_THROW(StreamExecutor(std::move(program), network.transport(0), std::move(peers), data.src(0), data.dst(0), kernels), core::InvalidArgument);
}

TEST(StreamExecutor, RunsAChainAndATranspose) {
  EXPECT_EQ(runOnStreams(transposePlan(64, 48, 24, 16), MemoryLayout::kRandom, 3, 1 << 20), "");
  EXPECT_EQ(runOnStreams(transposePlan(64, 48, 24, 16), MemoryLayout::kRandom, 4, 300), "");
  EXPECT_EQ(runOnStreams(chainPlan(500, 7, 30), MemoryLayout::kContiguous, 5, 1 << 20, {.groups = runtime::GroupLimits{1 << 20, 256}}), "");
  EXPECT_EQ(runOnStreams(chainPlan(1000, 7, 5), MemoryLayout::kRandom, 1, 256), "");
  EXPECT_EQ(runOnStreams(transposePlan(33, 31, 3, 4), MemoryLayout::kRandom, 2, 64, {100}), "");
}

}  // namespace
}  // namespace xmesh::replay
