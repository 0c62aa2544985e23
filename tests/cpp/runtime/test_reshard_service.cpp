#include <gtest/gtest.h>

#include <functional>
#include <numeric>

#include "core/error.h"
#include "core/resharding/fingerprint.h"
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
      {{{{kExtent}, dtype, core::Mesh({2}, {0, 1}), {Placement::shard(0)}}, {{kExtent}, dtype, core::Mesh({2}, {2, 3}), {std::move(dst)}}}},
      core::Topology::uniform(kNumRanks, 1), core::parseStrategy("broadcast"));
}

/// What the c10d layer does for a rank, without torch: group ranks are global ranks.
std::shared_ptr<const PreparedPlan> prepare(const core::ReshardingPlan& plan, int64_t rank) {
  auto out = std::make_shared<PreparedPlan>();
  out->participants = plan.participants();
  out->participant_peers.assign(out->participants.begin(), out->participants.end());
  out->participants_hash = hashRanks(out->participants);
  out->my_index = rank;
  out->program = compileProgram(plan, rank);
  out->program_peers.assign(out->program->peers().begin(), out->program->peers().end());
  out->fields = packFields({{"destination placements", core::placementsStr(plan.tensors[0].dst.placements)}});
  out->fingerprint = core::planFingerprint(plan);
  out->summary = "a test's tensor";
  out->plan = std::make_shared<core::ReshardingPlan>(plan);
  return out;
}

class ReshardServiceTest : public testing::TestWithParam<uint64_t> {
 protected:
  ReshardServiceTest() : network_(kNumRanks, GetParam()) {
    std::vector<int64_t> ranks(kNumRanks);
    std::iota(ranks.begin(), ranks.end(), 0);
    for (int32_t rank = 0; rank < kNumRanks; ++rank) {
      services_.push_back(hostService(network_, ranks, rank));
      for (int32_t peer = 0; peer < kNumRanks; ++peer) {
        if (peer != rank) {
          services_.back()->network().setAddress(peer, "fake");
        }
      }
    }
  }

  /// One rank's call: its memory and its handle.
  struct Made {
    std::vector<int32_t> src;
    std::vector<int32_t> dst;
    std::shared_ptr<ReshardCall> call;
  };

  std::unique_ptr<Made> begin(int32_t rank, const core::ReshardingPlan& plan, milliseconds timeout = milliseconds(0), bool is_held = false) {
    auto made = std::make_unique<Made>();
    CallRequest request;
    request.prepared = prepare(plan, rank);
    request.timeout = timeout;
    request.is_held = is_held;
    request.src = {local(request.prepared->program->srcShape(0), made->src)};
    request.dst = {local(request.prepared->program->dstShape(0), made->dst)};
    std::iota(made->src.begin(), made->src.end(), rank == 1 ? kExtent / 2 : 0);
    made->call = services_[static_cast<size_t>(rank)]->begin(std::move(request));
    return made;
  }

  static LocalTensor local(const std::optional<std::vector<int64_t>>& shape, std::vector<int32_t>& memory) {
    if (!shape.has_value()) {
      return {};
    }
    memory.assign(static_cast<size_t>(shape->front()), -1);
    return {memory.data(), *shape, {1}};
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

  /// A watch over all ranks, or a call under it, which moves nothing and waits for nobody.
  std::shared_ptr<ReshardCall> beginWatch(int32_t rank) {
    return beginMeeting(rank, kWatch, [](CallRequest& request) { request.is_watch = true; });
  }
  std::shared_ptr<ReshardCall> beginWatched(int32_t rank, uint64_t count, uint64_t turn) {
    return beginMeeting(rank, {kWatch.participants, kWatch.lane + 1, count}, [turn](CallRequest& request) {
      request.watch = kWatch;
      request.turn = turn;
    });
  }

  std::shared_ptr<ReshardCall> beginMeeting(int32_t rank, const CallKey& key, const std::function<void(CallRequest&)>& fill) {
    auto prepared = std::make_shared<PreparedPlan>();
    prepared->participants = {0, 1, 2, 3};
    prepared->participant_peers = {0, 1, 2, 3};
    prepared->participants_hash = hashRanks(prepared->participants);
    prepared->my_index = rank;
    prepared->fingerprint = "meeting";
    CallRequest request;
    request.prepared = prepared;
    request.key = key;
    request.is_agreed = true;
    fill(request);
    return services_[static_cast<size_t>(rank)]->begin(std::move(request));
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
  expectRefused([this] { services_[3]->refuse({0, 1, 2, 3}, {0, 1, 2, 3}, "wrong dtype"); }, "rank 3 refused this call: wrong dtype");
}

TEST_P(ReshardServiceTest, ARefusalWithoutANameReachesThoseWhoCallBeforeAndAfter) {
  for (int turn = 0; turn < 2; ++turn) {
    expectRefused([this] { services_[3]->refuseUnnamed({2, 3}, {0, 1, 2, 3}, "no spec"); }, "rank 3 refused this call: no spec");
  }
}

TEST_P(ReshardServiceTest, ARefusalWithoutANameThatAllMadeIsOfNoOtherCall) {
  const core::ReshardingPlan plan = planOf(Placement::replicate());
  for (int turn = 0; turn < 3; ++turn) {
    for (int32_t rank = 0; rank < kNumRanks; ++rank) {
      services_[static_cast<size_t>(rank)]->refuseUnnamed({2, 3}, {0, 1, 2, 3}, "no spec");
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
  services_[0]->refuseUnnamed({2, 3}, {0, 1, 2, 3}, "no spec");
  network_.runUntilIdle();
  for (const int32_t rank : {1, 2, 3}) {
    services_[static_cast<size_t>(rank)]->refuse({0, 1, 2, 3}, {0, 1, 2, 3}, "wrong dtype");
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
  services_[3]->refuseUnnamed({3}, {0, 1, 2, 3}, "made after its call");
  services_[1]->refuseUnnamed({1, 7}, {0, 1, 2, 3}, "with a rank that is not in the call");
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

TEST_P(ReshardServiceTest, HeldCallsStartTogetherInTheirOrder) {
  const core::ReshardingPlan plan = planOf(Placement::replicate());
  const auto others = [&] {
    std::vector<std::unique_ptr<Made>> calls;
    for (const int32_t rank : {1, 2, 3}) {
      calls.push_back(begin(rank, plan));
    }
    return calls;
  };
  auto first = others();
  auto second = others();
  auto third = others();
  first.insert(first.begin(), begin(0, plan, milliseconds(0), true));
  second.insert(second.begin(), begin(0, plan, milliseconds(0), true));
  network_.runUntilIdle();
  EXPECT_FALSE(first[0]->call->isCompleted());
  services_[0]->flush();
  expectWhole(first);
  expectWhole(second);
  third.insert(third.begin(), begin(0, plan, milliseconds(0), true));
  auto fourth = beginAll(plan);  // rank 0's takes the held one along
  expectWhole(third);
  expectWhole(fourth);
}

TEST_P(ReshardServiceTest, AHeldCallFailsWhenTheServiceCloses) {
  const auto made = begin(0, planOf(Placement::replicate()), milliseconds(0), true);
  services_[0]->close(milliseconds(0));
  ASSERT_TRUE(made->call->isCompleted());
  EXPECT_THROW(made->call->wait(), GroupError);
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
