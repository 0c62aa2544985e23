#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "runtime/plans.h"
#include "runtime/stream_run.h"

namespace xmesh::replay {
namespace {

using runtime::StreamExecutor;

/// An executor of one rank of a plan on memory of its own.
struct OneStream {
  OneStream(const core::ReshardingPlan& plan, int64_t rank, int64_t staging_bytes)
      : network(static_cast<int32_t>(plan.participants().back()) + 1), data(plan, plan.participants().back() + 1, MemoryLayout::kContiguous, 1) {
    auto program = runtime::compileProgram(plan, rank);
    std::vector<int32_t> peers = sameRanks(*program);
    executor = std::make_unique<StreamExecutor>(std::move(program), network.transport(static_cast<int32_t>(rank)), std::move(peers), data.src(rank),
                                                data.dst(rank), kernels, StreamExecutor::Options{staging_bytes});
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

TEST(StreamExecutor, GroupsHoldWhatProgressesIndependently) {
  EXPECT_EQ(OneStream(transposePlan(16, 56, 1, 7), 0, 1 << 20).executor->numGroups(), 1);
  EXPECT_EQ(OneStream(transposePlan(16, 64, 1, 8), 0, 1 << 20).executor->numGroups(), 8) << "of more ranks than a batch has places";
}

TEST(StreamExecutor, RunsAChainAndATranspose) {
  EXPECT_EQ(runOnStreams(chainPlan(1000, 7, 5), MemoryLayout::kRandom, 1, 256), "");
  EXPECT_EQ(runOnStreams(transposePlan(33, 31, 3, 4), MemoryLayout::kRandom, 2, 64, {100}), "");
}

}  // namespace
}  // namespace xmesh::replay
