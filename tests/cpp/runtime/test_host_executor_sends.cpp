// How the executor posts its sends: packed, in plan order, in turns with the transport.
#include <gtest/gtest.h>

#include <numeric>
#include <optional>
#include <vector>

#include "runtime/one_rank.h"
#include "runtime/plans.h"

namespace xmesh::replay {
namespace {

using core::Placement;

TEST(HostExecutor, PacksOnlyAsMuchAsStagingHolds) {
  std::vector<float> in(1000);
  OneRank rank(transposePlan(10, 100, 1, 5), 0, {{in.data(), {10, 100}, {100, 1}}}, {{}}, 3200);
  rank.executor->start();
  EXPECT_EQ(rank.transport.sends.size(), 2U) << "800 bytes each: one in its turn, one ahead";
  rank.transport.events->onSent(rank.transport.sends[0].cookie);
  EXPECT_EQ(rank.transport.sends.size(), 3U);
  EXPECT_LE(rank.pool.peakBytes(), 1600);
}

constexpr int64_t kRows = 1 << 10;
constexpr int64_t kColumns = 1 << 11;

/// Rank 0 owes ranks 1 and 2 half of the columns each, in two messages of 2 MiB.
core::ReshardingPlan halvesPlan() {
  core::ReshardingPlan plan = emptyPlan(
      {{lineSpec({kRows, kColumns}, "float32", {0}, Placement::replicate()), lineSpec({kRows, kColumns}, "float32", {1, 2}, Placement::shard(1))}});
  const int64_t half = kRows * kColumns / 4;
  plan.messages = {valueMessage(0, 0, half, 0, 1), valueMessage(0, half, 2 * half, 0, 1), valueMessage(1, 0, half, 0, 2),
                   valueMessage(1, half, 2 * half, 0, 2)};
  return plan;
}

TEST(HostExecutor, PackingGivesWayToTheTransport) {
  std::vector<float> in(kRows * kColumns, 7);
  OneRank rank(halvesPlan(), 0, {{in.data(), {kRows, kColumns}, {kColumns, 1}}}, {{}}, 64 << 20);
  rank.executor->start();
  for (size_t i = 1; i <= 4; ++i) {
    ASSERT_EQ(rank.transport.sends.size(), i);
    EXPECT_EQ(rank.transport.sends.back().peer, i <= 2 ? 1 : 2) << "in plan order";
    if (i < 4) {
      rank.transport.runTask();
    }
  }
}

TEST(HostExecutor, MayEndBeforeItsNextTurnToPack) {
  std::vector<float> in(kRows * kColumns, 7);
  OneRank rank(halvesPlan(), 0, {{in.data(), {kRows, kColumns}, {kColumns, 1}}}, {{}}, 64 << 20);
  rank.executor->start();
  EXPECT_EQ(rank.transport.tasks.size(), 1U);
  for (size_t i = 0; i < rank.transport.sends.size(); ++i) {  // each one that is sent lets the next one be packed
    rank.transport.events->onSent(rank.transport.sends[i].cookie);
  }
  EXPECT_EQ(rank.num_done, 1);
  rank.executor.reset();
  rank.transport.runTask();
}

/// Rank 1 gets columns 0-1 of a (4, 4) from rank 0 and columns 2-3 from rank 3, packed, and passes them on to rank 2 as `to_rank_2` says.
struct Relay {
  explicit Relay(const std::vector<core::Message>& to_rank_2) : out(16) {
    core::ReshardingPlan plan =
        emptyPlan({{lineSpec({4, 4}, "float32", {0, 3}, Placement::shard(1)), lineSpec({4, 4}, "float32", {1, 2}, Placement::replicate())}});
    plan.messages = {valueMessage(0, 0, 8, 0, 1), valueMessage(1, 0, 8, 3, 1)};
    plan.messages.insert(plan.messages.end(), to_rank_2.begin(), to_rank_2.end());
    rank.emplace(plan, 1, std::vector<runtime::LocalTensor>{{}}, std::vector<runtime::LocalTensor>{{out.data(), {4, 4}, {4, 1}}});
    rank->executor->start();
  }

  /// The bytes of one peer arrive: 0, 1, ... from rank 0, 10, 11, ... from rank 3.
  void arrive(size_t receive) {
    const ManualTransport::Posted posted = rank->transport.receives.at(receive);
    auto* data = static_cast<float*>(const_cast<void*>(posted.data));
    std::iota(data, data + posted.num_bytes / 4, posted.peer == 0 ? 0.0F : 10.0F);
    rank->transport.events->onReceived(posted.cookie);
  }
  void sent(size_t send) { rank->transport.events->onSent(rank->transport.sends.at(send).cookie); }
  const float* sendOf(size_t send) const { return static_cast<const float*>(rank->transport.sends.at(send).data); }
  void expectDone() {
    EXPECT_EQ(out, (std::vector<float>{0, 1, 10, 11, 2, 3, 12, 13, 4, 5, 14, 15, 6, 7, 16, 17}));
    EXPECT_EQ(rank->num_done, 1);
    EXPECT_EQ(rank->pool.bytesInUse(), 0);
    EXPECT_TRUE(rank->transport.open_operations.empty());
  }

  std::vector<float> out;
  std::optional<OneRank> rank;
};

const std::vector<float> kNothing(16);

TEST(HostExecutor, PassesOnWhatCameInPackedBeforeItUnpacksIt) {
  Relay relay({valueMessage(0, 0, 8, 1, 2), valueMessage(1, 0, 8, 1, 2)});
  relay.arrive(0);
  relay.arrive(1);
  ASSERT_EQ(relay.rank->transport.sends.size(), 2U);
  EXPECT_EQ(relay.sendOf(0), relay.rank->transport.receives[0].data) << "not packed again";
  EXPECT_EQ(relay.sendOf(1), relay.rank->transport.receives[1].data);
  EXPECT_NE(relay.rank->transport.sends[0].operation, relay.rank->transport.sends[1].operation) << "slices have tracks of their own";
  EXPECT_EQ(relay.rank->transport.receives[0].operation, relay.rank->transport.receives[1].operation) << "holders' messages share one";
  EXPECT_EQ(relay.out, kNothing);
  while (!relay.rank->transport.tasks.empty()) {
    EXPECT_EQ(relay.rank->num_done, 0);
    relay.rank->transport.runTask();
  }
  relay.sent(0);
  relay.sent(1);
  relay.expectDone();
}

TEST(HostExecutor, UnpacksWhatIsSentBeforeItsTurnToUnpack) {
  Relay relay({valueMessage(0, 0, 8, 1, 2), valueMessage(1, 0, 8, 1, 2)});
  relay.arrive(0);
  relay.arrive(1);
  relay.sent(0);
  EXPECT_EQ(relay.out, (std::vector<float>{0, 1, 0, 0, 2, 3, 0, 0, 4, 5, 0, 0, 6, 7, 0, 0}));
  relay.sent(1);
  relay.expectDone();
  relay.rank->transport.runTask();
}

TEST(HostExecutor, PassesOnWhatCameBeforeTheBytesOfAnotherSlice) {
  Relay relay({valueMessage(0, 0, 8, 1, 2), valueMessage(1, 0, 4, 1, 2), valueMessage(1, 4, 8, 1, 2)});
  relay.arrive(1);
  ASSERT_EQ(relay.rank->transport.sends.size(), 2U) << "the first in plan order is late, but of another slice";
  EXPECT_EQ(*relay.sendOf(0), 10);
  EXPECT_EQ(*relay.sendOf(1), 14);
  relay.arrive(0);
  ASSERT_EQ(relay.rank->transport.sends.size(), 3U);
  for (size_t i = 0; i < 3; ++i) {
    relay.sent(i);
  }
  relay.expectDone();
}

TEST(HostExecutor, PassesOnOneSliceInPlanOrder) {
  core::ReshardingPlan plan =
      emptyPlan({{lineSpec({4, 4}, "float32", {0, 3}, Placement::shard(1)), lineSpec({4, 4}, "float32", {1, 2}, Placement::replicate())}});
  plan.messages = {valueMessage(0, 0, 4, 0, 1), valueMessage(0, 4, 8, 0, 1), valueMessage(0, 0, 4, 1, 2),
                   valueMessage(0, 4, 8, 1, 2), valueMessage(1, 0, 8, 3, 1), valueMessage(1, 0, 8, 3, 2)};
  std::vector<float> out(16);
  OneRank rank(plan, 1, {{}}, {{out.data(), {4, 4}, {4, 1}}});
  rank.executor->start();
  auto* second = static_cast<float*>(const_cast<void*>(rank.transport.receives.at(1).data));
  std::iota(second, second + 4, 4.0F);
  rank.transport.events->onReceived(rank.transport.receives[1].cookie);
  EXPECT_TRUE(rank.transport.sends.empty());
  EXPECT_EQ(out[8], 4) << "nothing was passed on: unpacked at once";
  rank.transport.events->onReceived(rank.transport.receives[0].cookie);
  ASSERT_EQ(rank.transport.sends.size(), 2U);
  EXPECT_EQ(*static_cast<const float*>(rank.transport.sends[1].data), 4);
}

TEST(HostExecutor, CopiesPartsOfWhatCameInPacked) {
  Relay relay({valueMessage(0, 0, 3, 1, 2), valueMessage(0, 3, 8, 1, 2)});
  relay.arrive(0);
  ASSERT_EQ(relay.rank->transport.sends.size(), 2U);
  EXPECT_EQ(std::vector<float>(relay.sendOf(0), relay.sendOf(0) + 3), (std::vector<float>{0, 1, 2}));
  EXPECT_EQ(std::vector<float>(relay.sendOf(1), relay.sendOf(1) + 5), (std::vector<float>{3, 4, 5, 6, 7}));
  EXPECT_EQ(relay.out[12], 6) << "its buffer was not taken: unpacked at once";
  relay.sent(0);
  relay.sent(1);
  relay.arrive(1);
  relay.expectDone();
}

TEST(HostExecutor, CopiesForTheSecondPeerWhatTheFirstHasTaken) {
  core::ReshardingPlan plan =
      emptyPlan({{lineSpec({4, 4}, "float32", {0, 3}, Placement::shard(1)), lineSpec({4, 4}, "float32", {1, 2, 4}, Placement::replicate())}});
  plan.messages = {valueMessage(0, 0, 8, 0, 1), valueMessage(0, 0, 8, 1, 2), valueMessage(0, 0, 8, 1, 4), valueMessage(1, 0, 8, 3, 1)};
  std::vector<float> out(16);
  OneRank rank(plan, 1, {{}}, {{out.data(), {4, 4}, {4, 1}}});
  rank.executor->start();
  auto* data = static_cast<float*>(const_cast<void*>(rank.transport.receives.at(0).data));
  std::iota(data, data + 8, 0.0F);
  rank.transport.events->onReceived(rank.transport.receives[0].cookie);
  ASSERT_EQ(rank.transport.sends.size(), 2U);
  EXPECT_EQ(rank.transport.sends[0].data, data);
  const auto* copy = static_cast<const float*>(rank.transport.sends[1].data);
  EXPECT_NE(copy, data);
  EXPECT_EQ(std::vector<float>(copy, copy + 8), std::vector<float>(data, data + 8));
  EXPECT_EQ(out, kNothing);
}

TEST(HostExecutor, UnpacksFirstWhatIsSentFromItsPlace) {
  Relay relay({valueMessage(0, 0, 8, 1, 2), valueMessage(0, 2, 4, 1, 2), valueMessage(1, 0, 8, 1, 2)});  // elements 2 and 3 are a row: one run
  relay.arrive(0);
  ASSERT_EQ(relay.rank->transport.sends.size(), 2U);
  EXPECT_EQ(relay.sendOf(1), relay.out.data() + 4);
  EXPECT_EQ(relay.sendOf(1)[1], 3) << "unpacked before";
}

TEST(HostExecutor, UnpacksFirstWhatIsOnlyAPartOfASend) {
  core::ReshardingPlan plan =
      emptyPlan({{lineSpec({4, 4}, "float32", {0, 3}, Placement::shard(1)), lineSpec({4, 4}, "float32", {1, 2}, Placement::replicate())}});
  plan.messages = {valueMessage(0, 0, 4, 0, 1), valueMessage(0, 4, 8, 0, 1),  // the second one's dependent spans both
                   valueMessage(0, 0, 8, 1, 2), valueMessage(1, 0, 8, 3, 1)};
  std::vector<float> out(16);
  OneRank rank(plan, 1, {{}}, {{out.data(), {4, 4}, {4, 1}}});
  rank.executor->start();
  for (size_t i = 0; i < 2; ++i) {
    auto* data = static_cast<float*>(const_cast<void*>(rank.transport.receives.at(i).data));
    std::iota(data, data + 4, static_cast<float>(4 * i));
    rank.transport.events->onReceived(rank.transport.receives[i].cookie);
  }
  ASSERT_EQ(rank.transport.sends.size(), 1U);
  const auto* sent = static_cast<const float*>(rank.transport.sends[0].data);
  EXPECT_EQ(std::vector<float>(sent, sent + 8), (std::vector<float>{0, 1, 2, 3, 4, 5, 6, 7}));
}

struct NobodyWaits final : runtime::StagingClient {
  void onStagingFree() override {}
};

TEST(HostExecutor, CopiesWhatCameInPackedWhereBuffersDiffer) {
  core::ReshardingPlan plan =
      emptyPlan({{lineSpec({32, 4}, "float32", {0}, Placement::replicate()), lineSpec({32, 4}, "float32", {1, 2}, Placement::replicate())}});
  plan.messages = {valueMessage(0, 0, 126, 0, 1), valueMessage(0, 0, 126, 1, 2), valueMessage(0, 126, 128, 0, 1), valueMessage(0, 126, 128, 1, 2)};
  std::vector<float> out(256);
  OneRank rank(plan, 1, {{}}, {{out.data(), {32, 4}, {8, 2}}});
  NobodyWaits other;
  const runtime::StagingBuffer cached = rank.pool.acquire(runtime::StagingKind::kSend, 512, other);  // 504 are asked for
  rank.pool.release(cached, other);
  rank.executor->start();
  const ManualTransport::Posted received = rank.transport.receives.at(0);
  EXPECT_EQ(received.data, cached.data);
  auto* data = static_cast<float*>(const_cast<void*>(received.data));
  std::iota(data, data + 126, 1.0F);
  rank.transport.events->onReceived(received.cookie);
  ASSERT_EQ(rank.transport.sends.size(), 1U);
  const auto* sent = static_cast<const float*>(rank.transport.sends[0].data);
  EXPECT_NE(sent, data);
  EXPECT_EQ(std::vector<float>(sent, sent + 126), std::vector<float>(data, data + 126));
  EXPECT_EQ(out[250], 126);
}

TEST(HostExecutor, MayBeCanceledBeforeItUnpacks) {
  Relay relay({valueMessage(0, 0, 8, 1, 2), valueMessage(1, 0, 8, 1, 2)});
  relay.arrive(0);
  relay.rank->executor->cancel();
  EXPECT_EQ(relay.rank->pool.bytesInUse(), 0);
  EXPECT_TRUE(relay.rank->transport.open_operations.empty());
  relay.rank->transport.runTask();
  EXPECT_EQ(relay.out, kNothing);
}

TEST(HostExecutor, SendsThatMustBePackedOvertakeThoseThatAreNotReady) {
  core::ReshardingPlan plan =
      emptyPlan({{lineSpec({4, 4}, "float32", {0, 1}, Placement::shard(1)), lineSpec({4, 4}, "float32", {1, 2, 3, 4}, Placement::replicate())}});
  ASSERT_EQ(plan.tasks.size(), 2U);
  plan.messages = {valueMessage(0, 0, 8, 0, 1), valueMessage(0, 0, 8, 1, 2), valueMessage(1, 0, 8, 1, 2), valueMessage(1, 0, 8, 1, 3),
                   valueMessage(1, 0, 8, 1, 4), valueMessage(0, 0, 8, 2, 3), valueMessage(0, 0, 8, 2, 4)};
  std::vector<float> in(16, 7);
  std::vector<float> out(16);
  OneRank rank(plan, 1, {{in.data(), {4, 2}, {4, 1}}}, {{out.data(), {4, 4}, {4, 1}}}, 256);
  rank.executor->start();
  const std::vector<int32_t> peers{2, 3, 4};  // what it holds itself; the first in plan order is late
  for (size_t i = 0; i < peers.size(); ++i) {
    ASSERT_EQ(rank.transport.sends.size(), i + 1) << "room for one that overtakes";
    EXPECT_EQ(rank.transport.sends[i].peer, peers[i]);
    EXPECT_EQ(static_cast<const float*>(rank.transport.sends[i].data)[7], 7);
    if (i + 1 < peers.size()) {
      rank.transport.events->onSent(rank.transport.sends[i].cookie);
    }
  }
  rank.transport.events->onReceived(0);
  ASSERT_EQ(rank.transport.sends.size(), 4U) << "memory of its own is kept for the first in plan order";
  EXPECT_EQ(rank.transport.sends[3].peer, 2);
  rank.transport.events->onSent(rank.transport.sends[2].cookie);
  rank.transport.events->onSent(rank.transport.sends[3].cookie);
  while (!rank.transport.tasks.empty()) {
    rank.transport.runTask();
  }
  EXPECT_EQ(rank.num_done, 1);
  EXPECT_EQ(rank.pool.bytesInUse(), 0);
}

TEST(HostExecutor, HeldUpSendsGoInPlanOrder) {
  core::ReshardingPlan plan =
      emptyPlan({{lineSpec({16, 4}, "float32", {0, 1}, Placement::shard(1)), lineSpec({16, 4}, "float32", {1, 2, 3, 4}, Placement::replicate())}});
  plan.messages = {valueMessage(0, 0, 32, 0, 1), valueMessage(0, 0, 32, 1, 2)};
  std::vector<int32_t> peers;
  for (int64_t begin = 0; begin < 32; begin += 8) {
    for (const int32_t peer : {3, 4}) {
      plan.messages.push_back(valueMessage(1, begin, begin + 8, 1, peer));
      peers.push_back(peer);
    }
  }
  std::vector<float> in(64, 7);
  std::vector<float> out(64);
  OneRank rank(plan, 1, {{in.data(), {16, 2}, {4, 1}}}, {{out.data(), {16, 4}, {4, 1}}}, 256);
  rank.executor->start();
  for (size_t i = 0; i < peers.size(); ++i) {
    ASSERT_EQ(rank.transport.sends.size(), i + 1) << "room for one";
    EXPECT_EQ(rank.transport.sends[i].peer, peers[i]);
    rank.transport.events->onSent(rank.transport.sends[i].cookie);
  }
  EXPECT_EQ(rank.transport.sends.size(), peers.size()) << "the first waits for its bytes";
}

}  // namespace
}  // namespace xmesh::replay
