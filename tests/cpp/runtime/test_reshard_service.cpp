#include <gtest/gtest.h>

#include <functional>
#include <numeric>

#include "core/error.h"
#include "core/resharding/plan_resharding.h"
#include "runtime/fake_networks.h"

namespace xmesh::runtime {
namespace {

using core::Placement;
using std::chrono::milliseconds;

constexpr int32_t kNumRanks = 4;
constexpr int64_t kExtent = 96;

core::ReshardingPlan planOf(Placement dst) {
  const core::DType dtype = core::DType::parse("int32");
  return core::planResharding(
      {{{{kExtent}, dtype, core::Mesh({2}, {0, 1}), {Placement::shard(0)}}, {{kExtent}, dtype, core::Mesh({2}, {2, 3}), {dst}}}},
      core::Topology::uniform(kNumRanks, 1), core::parseStrategy("broadcast"));
}

std::shared_ptr<const PreparedPlan> prepare(const core::ReshardingPlan& plan, int64_t rank) {
  std::shared_ptr<PreparedPlan> out = preparedFor(plan, rank);
  out->terms.fields = packFields({{"destination placements", core::placementsStr(plan.tensors[0].dst.placements)}});
  out->terms.summary = "a test's tensor";
  return out;
}

class ReshardServiceTest : public testing::TestWithParam<uint64_t> {
 protected:
  ReshardServiceTest() : network_(kNumRanks, GetParam()) {
    std::vector<int64_t> ranks(kNumRanks);
    std::iota(ranks.begin(), ranks.end(), 0);
    for (int32_t rank = 0; rank < kNumRanks; ++rank) {
      services_.push_back(hostService(network_, ranks, rank));
      introduce(*services_.back(), rank, kNumRanks);
    }
  }

  /// One rank's call: its memory and its handle.
  struct Made {
    std::vector<int32_t> src;
    std::vector<int32_t> dst;
    std::shared_ptr<ReshardCall> call;
  };

  std::unique_ptr<Made> begin(int32_t rank, const core::ReshardingPlan& plan, milliseconds timeout = milliseconds(0)) {
    auto made = std::make_unique<Made>();
    ReshardRequest request;
    request.movement = lend(*made, prepare(plan, rank));
    request.timeout = timeout;
    made->call = services_[static_cast<size_t>(rank)]->reshard(std::move(request));
    return made;
  }

  /// One rank's transfer under the watch, which starts with flush().
  std::unique_ptr<Made> transfer(int32_t rank, const core::ReshardingPlan& plan, uint64_t count, uint64_t turn = 0) {
    auto made = std::make_unique<Made>();
    TransferRequest request;
    request.movement = lend(*made, prepare(plan, rank));
    request.key = {kWatch.participants, kWatch.lane + 1, count};
    request.watch = kWatch;
    request.phase = turn;
    made->call = services_[static_cast<size_t>(rank)]->transfer(std::move(request));
    return made;
  }

  static Movement lend(Made& made, std::shared_ptr<const PreparedPlan> prepared) {
    Movement out;
    out.src = {localIn(made.src, prepared->program->srcShape(0))};
    out.dst = {localIn(made.dst, prepared->program->dstShape(0))};
    std::iota(made.src.begin(), made.src.end(), prepared->program->globalRank() == 1 ? kExtent / 2 : 0);
    out.prepared = std::move(prepared);
    return out;
  }

  std::vector<std::unique_ptr<Made>> beginAll(const core::ReshardingPlan& plan, milliseconds timeout = milliseconds(0)) {
    std::vector<std::unique_ptr<Made>> out;
    for (int32_t rank = 0; rank < kNumRanks; ++rank) {
      out.push_back(begin(rank, plan, timeout));
    }
    return out;
  }

  void expectWhole(const std::vector<std::unique_ptr<Made>>& calls) {
    network_.runUntilIdle();
    std::vector<int32_t> whole(kExtent);
    std::iota(whole.begin(), whole.end(), 0);
    for (const auto& made : calls) {
      ASSERT_TRUE(made->call->isCompleted());
      EXPECT_FALSE(made->call->failure().has_value());
    }
    EXPECT_EQ(calls[2]->dst, whole);
    EXPECT_EQ(calls[3]->dst, whole);
  }

  /// A watch over all ranks.
  std::shared_ptr<ReshardCall> beginWatch(int32_t rank) {
    auto terms = std::make_shared<CallTerms>();
    terms->participants = participantsOf({0, 1, 2, 3}, rank);
    WatchRequest request;
    request.terms = terms;
    request.key = kWatch;
    return services_[static_cast<size_t>(rank)]->watch(std::move(request));
  }
  /// A transfer under it that moves nothing and waits for nobody.
  std::shared_ptr<ReshardCall> beginWatched(int32_t rank, uint64_t count, uint64_t turn) {
    auto prepared = std::make_shared<PreparedPlan>();
    prepared->terms.participants = participantsOf({0, 1, 2, 3}, rank);
    auto nothing = std::make_shared<Program>();
    nothing->global_rank = rank;
    prepared->program = std::move(nothing);
    TransferRequest request;
    request.movement.prepared = std::move(prepared);
    request.key = {kWatch.participants, kWatch.lane + 1, count};
    request.watch = kWatch;
    request.phase = turn;
    std::shared_ptr<ReshardCall> call = services_[static_cast<size_t>(rank)]->transfer(std::move(request));
    services_[static_cast<size_t>(rank)]->flush();
    return call;
  }
  static constexpr CallKey kWatch{77, 5, 0};

  /// Rank 0 calls before rank 3 refuses, ranks 1 and 2 after it; then all make a good call.
  void expectRefused(const std::function<void()>& refuse, const std::string& text) {
    const core::ReshardingPlan plan = planOf(Placement::replicate());
    std::vector<std::unique_ptr<Made>> calls;
    calls.push_back(begin(0, plan));
    network_.runUntilIdle();
    refuse();
    network_.runUntilIdle();
    calls.push_back(begin(1, plan));
    calls.push_back(begin(2, plan));
    network_.runUntilIdle();
    for (const auto& made : calls) {
      ASSERT_TRUE(made->call->isCompleted());
      EXPECT_EQ(made->call->failure()->text.find(text), 0U) << made->call->failure()->text;
    }
    expectWhole(beginAll(plan));
  }

  transport::FakeHostNetwork network_;
  std::vector<std::unique_ptr<ReshardService>> services_;
};

TEST_P(ReshardServiceTest, MovesBytesInSeveralCallsAtOnce) {
  const core::ReshardingPlan plan = planOf(Placement::replicate());
  const auto first = beginAll(plan);
  const auto second = beginAll(plan);
  expectWhole(second);
  expectWhole(first);
}

TEST_P(ReshardServiceTest, TellsEveryRankWhatDiffers) {
  std::vector<std::unique_ptr<Made>> calls;
  for (int32_t rank = 0; rank < kNumRanks; ++rank) {
    calls.push_back(begin(rank, planOf(rank == 3 ? Placement::shard(0) : Placement::replicate())));
  }
  network_.runUntilIdle();
  for (const auto& made : calls) {
    ASSERT_TRUE(made->call->isCompleted());
    EXPECT_THROW(made->call->wait(), core::InvalidArgument);
    EXPECT_NE(made->call->failure()->text.find("disagree on destination placements"), std::string::npos) << made->call->failure()->text;
  }
  expectWhole(beginAll(planOf(Placement::replicate())));
}

TEST_P(ReshardServiceTest, ARefusalReachesThoseWhoCallBeforeAndAfter) {
  expectRefused([this] { services_[3]->refusals().refuse({0, 1, 2, 3}, {0, 1, 2, 3}, "wrong dtype"); }, "rank 3 refused this call: wrong dtype");
}

TEST_P(ReshardServiceTest, ARefusalWithoutANameReachesThoseWhoCallBeforeAndAfter) {
  for (int turn = 0; turn < 2; ++turn) {
    expectRefused([this] { services_[3]->refusals().refuseUnnamed({2, 3}, {0, 1, 2, 3}, "no spec"); }, "rank 3 refused this call: no spec");
  }
}

TEST_P(ReshardServiceTest, ARefusalWithoutANameThatAllMadeIsOfNoOtherCall) {
  const core::ReshardingPlan plan = planOf(Placement::replicate());
  for (int turn = 0; turn < 3; ++turn) {
    for (int32_t rank = 0; rank < kNumRanks; ++rank) {
      services_[static_cast<size_t>(rank)]->refusals().refuseUnnamed({2, 3}, {0, 1, 2, 3}, "no spec");
      if (turn == 2) {
        network_.runUntilIdle();
      }
    }
    network_.runUntilIdle();
    expectWhole(beginAll(plan));
  }
}

TEST_P(ReshardServiceTest, ARefusalWithAndOneWithoutANameAreOfTheSameCall) {
  const core::ReshardingPlan plan = planOf(Placement::replicate());
  services_[0]->refusals().refuseUnnamed({2, 3}, {0, 1, 2, 3}, "no spec");
  network_.runUntilIdle();
  for (const int32_t rank : {1, 2, 3}) {
    services_[static_cast<size_t>(rank)]->refusals().refuse({0, 1, 2, 3}, {0, 1, 2, 3}, "wrong dtype");
    network_.runUntilIdle();
  }
  expectWhole(beginAll(plan));
}

TEST_P(ReshardServiceTest, ARefusalWithoutANameIsOfNoCallBeforeItAndNoneOfOtherRanks) {
  const core::ReshardingPlan plan = planOf(Placement::replicate());
  std::vector<std::unique_ptr<Made>> calls;
  for (const int32_t rank : {3, 1, 0}) {
    calls.push_back(begin(rank, plan));
  }
  network_.runUntilIdle();
  services_[3]->refusals().refuseUnnamed({3}, {0, 1, 2, 3}, "made after its call");
  services_[1]->refusals().refuseUnnamed({1, 7}, {0, 1, 2, 3}, "with a rank that is not in the call");
  network_.runUntilIdle();
  calls.insert(calls.begin() + 2, begin(2, plan));
  std::swap(calls[0], calls[3]);
  expectWhole(calls);
}

TEST_P(ReshardServiceTest, AtTheTimeoutNamesWhoHasNotCalled) {
  const core::ReshardingPlan plan = planOf(Placement::replicate());
  std::vector<std::unique_ptr<Made>> calls;
  for (const int32_t rank : {0, 1, 3}) {
    calls.push_back(begin(rank, plan, milliseconds(1000)));
  }
  network_.advance(milliseconds(1000));
  network_.advance(milliseconds(2000));
  for (const auto& made : calls) {
    ASSERT_TRUE(made->call->isCompleted());
    EXPECT_THROW(made->call->wait(), PeerError);
    EXPECT_EQ(made->call->failure()->blamed_ranks, std::vector<int64_t>{2});
    EXPECT_NE(made->call->failure()->text.find("rank 2 has not made this call; it has called no reshard yet"), std::string::npos);
  }
}

TEST_P(ReshardServiceTest, AtTheTimeoutNamesWhoIsStopped) {
  const core::ReshardingPlan plan = planOf(Placement::replicate());
  network_.stop(2);
  const auto calls = beginAll(plan, milliseconds(1000));
  network_.advance(milliseconds(1000));
  network_.advance(milliseconds(2000));
  for (const int32_t rank : {0, 1, 3}) {
    const auto& made = calls[static_cast<size_t>(rank)];
    ASSERT_TRUE(made->call->isCompleted());
    EXPECT_EQ(made->call->failure()->blamed_ranks, std::vector<int64_t>{2});
    EXPECT_NE(made->call->failure()->text.find("rank 2 does not answer"), std::string::npos) << made->call->failure()->text;
  }
}

TEST_P(ReshardServiceTest, ADeadPeerFailsItsCallsAndLaterOnes) {
  const core::ReshardingPlan plan = planOf(Placement::replicate());
  expectWhole(beginAll(plan));
  std::vector<std::unique_ptr<Made>> calls;
  for (const int32_t rank : {0, 2, 3}) {
    calls.push_back(begin(rank, plan));
  }
  network_.runUntilIdle();
  network_.kill(1);
  network_.runUntilIdle();
  calls.push_back(begin(0, plan));
  network_.runUntilIdle();
  for (const auto& made : calls) {
    ASSERT_TRUE(made->call->isCompleted());
    EXPECT_EQ(made->call->failure()->kind, FailureKind::kPeer);
    EXPECT_EQ(made->call->failure()->blamed_ranks, std::vector<int64_t>{1}) << made->call->failure()->text;
  }
}

/// Rank 3 is a call behind when rank 0 stops: it fails there, tells, and leaves. Rank 1 has ended that call and is in the next.
TEST_P(ReshardServiceTest, WhoLeavesAfterAFailureIsNotBlamedForIt) {
  const auto made = begin(1, planOf(Placement::replicate()));
  network_.runUntilIdle();
  ReshardService& service = *services_[1];
  service.network().post([&service] {
    service.onControl(3, encode(FailNotice{CallKey{1, 0, 0}, {FailureKind::kPeer, "no answer from rank [0]", {0}}, {}}));
    service.onPeerLost(3, "", true);
  });
  network_.runUntilIdle();
  const auto later = begin(1, planOf(Placement::replicate()));
  network_.runUntilIdle();
  for (const auto& call : {made->call, later->call}) {
    ASSERT_TRUE(call->isCompleted());
    EXPECT_EQ(call->failure()->blamed_ranks, std::vector<int64_t>{0});
    EXPECT_NE(call->failure()->text.find("rank 3 is lost (it has left the group after this: no answer from rank [0])"), std::string::npos)
        << call->failure()->text;
  }
}

TEST_P(ReshardServiceTest, TransfersStartTogetherInTheirOrder) {
  const core::ReshardingPlan plan = planOf(Placement::replicate());
  std::vector<std::vector<std::unique_ptr<Made>>> transfers(3);
  for (int32_t rank = 0; rank < kNumRanks; ++rank) {
    beginWatch(rank);
    for (uint64_t count = 0; count < 2; ++count) {
      transfers[count].push_back(transfer(rank, plan, count));
    }
  }
  for (int32_t rank = 1; rank < kNumRanks; ++rank) {
    services_[static_cast<size_t>(rank)]->flush();
  }
  network_.runUntilIdle();
  EXPECT_FALSE(transfers[0][2]->call->isCompleted());
  services_[0]->flush();
  expectWhole(transfers[0]);
  expectWhole(transfers[1]);
  for (int32_t rank = 0; rank < kNumRanks; ++rank) {
    transfers[2].push_back(transfer(rank, plan, 2));
  }
  expectWhole(beginAll(plan));  // takes the held ones along
  expectWhole(transfers[2]);
}

TEST_P(ReshardServiceTest, AHeldTransferFailsWhenTheServiceCloses) {
  const auto made = transfer(0, planOf(Placement::replicate()), 0);
  services_[0]->close(milliseconds(0));
  ASSERT_TRUE(made->call->isCompleted());
  EXPECT_THROW(made->call->wait(), GroupError);
}

/// Rank 1 refuses before it knows where rank 0 is; that one looks for it only later.
TEST_P(ReshardServiceTest, ARankAnswersThoseWhomItHasNotLookedFor) {
  transport::FakeHostNetwork network(2, GetParam());
  const auto refusing = hostService(network, {0, 1}, 1);
  refusing->refusals().refuse({0, 1}, {0, 1}, "wrong dtype");
  network.runUntilIdle();
  const auto calling = hostService(network, {0, 1}, 0);
  calling->network().setAddress(1, "fake");
  ReshardRequest request;
  auto prepared = std::make_shared<PreparedPlan>();
  prepared->terms.participants = participantsOf({0, 1}, 0);
  prepared->program = std::make_shared<Program>();
  request.movement.prepared = std::move(prepared);
  const auto call = calling->reshard(std::move(request));
  network.runUntilIdle();
  ASSERT_TRUE(call->isCompleted());
  EXPECT_EQ(call->failure()->text, "rank 1 refused this call: wrong dtype");
}

/// Rank 3 refuses turn 2 while the others are still in turn 1.
TEST_P(ReshardServiceTest, AFailureOfALaterTurnWaitsForIt) {
  std::vector<std::shared_ptr<ReshardCall>> watches;
  std::vector<std::shared_ptr<ReshardCall>> calls;
  for (int32_t rank = 0; rank < kNumRanks; ++rank) {
    watches.push_back(beginWatch(rank));
    calls.push_back(beginWatched(rank, 0, 1));
  }
  network_.runUntilIdle();
  services_[3]->failCall(kWatch, {FailureKind::kMistake, "no target", {}, -1, -1, 2});
  network_.runUntilIdle();
  EXPECT_TRUE(watches[3]->failure().has_value());
  for (int32_t rank = 0; rank < 3; ++rank) {
    EXPECT_FALSE(watches[static_cast<size_t>(rank)]->isCompleted());
    EXPECT_FALSE(calls[static_cast<size_t>(rank)]->failure().has_value());
  }
  const auto late = beginWatched(0, 1, 1);
  const auto next = beginWatched(1, 2, 2);
  network_.runUntilIdle();
  EXPECT_FALSE(watches[0]->isCompleted()) << "rank 1 passed on what is for turn 2";
  EXPECT_TRUE(late->isCompleted());
  EXPECT_FALSE(late->failure().has_value());
  EXPECT_EQ(next->failure().value().text, "no target");
  EXPECT_EQ(watches[1]->failure().value().text, "no target");
  network_.kill(3);
  network_.runUntilIdle();
  EXPECT_EQ(watches[0]->failure().value().text, "no target") << "rank 3 died of what it had told";
}

TEST_P(ReshardServiceTest, AFailureOfTheTurnOfTheOthersComesAtOnce) {
  std::vector<std::shared_ptr<ReshardCall>> watches;
  for (int32_t rank = 0; rank < kNumRanks; ++rank) {
    watches.push_back(beginWatch(rank));
  }
  beginWatched(0, 0, 2);
  network_.runUntilIdle();
  services_[3]->failCall(kWatch, {FailureKind::kMistake, "no target", {}, -1, -1, 2});
  network_.runUntilIdle();
  EXPECT_EQ(watches[0]->failure().value().text, "no target");
  EXPECT_FALSE(watches[1]->isCompleted());
  services_[2]->failCall(kWatch, {FailureKind::kStage, "raised", {}, 1, 0});  // of no turn: for all
  network_.runUntilIdle();
  EXPECT_EQ(watches[1]->failure().value().text, "raised");
}

TEST_P(ReshardServiceTest, ClosingFailsWhatIsInFlight) {
  const auto made = begin(0, planOf(Placement::replicate()));
  network_.runUntilIdle();
  services_[0]->close(milliseconds(0));
  ASSERT_TRUE(made->call->isCompleted());
  EXPECT_THROW(made->call->wait(), GroupError);
  EXPECT_THROW(begin(0, planOf(Placement::replicate())), GroupError);
}

INSTANTIATE_TEST_SUITE_P(Seeds, ReshardServiceTest, testing::Range<uint64_t>(0, 20));

}  // namespace
}  // namespace xmesh::runtime
