#include <gtest/gtest.h>

#include <random>

#include "runtime/fake_networks.h"

// Ranks make pipelines of ranks that they do not agree on, in any order that the network allows: a watch ends well only where all of its ranks came,
// and what they make next works.

namespace xmesh::runtime {
namespace {

constexpr int32_t kNumRanks = 3;
using Ranks = std::vector<int64_t>;

/// One rank's constructor of a pipeline: arrives, and watches.
class Rank {
 public:
  Rank(int32_t rank, transport::FakeHostNetwork& network) : rank_(rank), service_(hostService(network, {0, 1, 2}, rank)) {
    for (int32_t peer = 0; peer < kNumRanks; ++peer) {
      if (peer != rank) {
        service_->network().setAddress(peer, "fake");
      }
    }
  }

  void make(const Ranks& ranks) {
    const std::vector<int32_t> peers(ranks.begin(), ranks.end());
    const uint64_t count = service_->arrivals().arrive(ranks, peers);
    auto terms = std::make_shared<CallTerms>();
    terms->participants = participantsOf(ranks, rank_);
    WatchRequest request;
    request.terms = terms;
    request.key = pipelineWatch(ranks, count);
    request.pipeline = count;
    watch_ = service_->watch(std::move(request));
    MeetingRequest meeting;
    meeting.terms = terms;
    meeting.key = {terms->participants.hash, 99, count};
    meeting.watch = watch_->key();
    meeting_ = service_->meet(std::move(meeting));
  }
  void refuse(const Ranks& ranks, const std::string& text) {
    Failure failure;
    failure.text = text;
    service_->arrivals().arrive(ranks, {0, 1, 2}, failure);
  }
  /// Asks the others about its failures, before it makes the next.
  void comeBack() { settled_ = service_->arrivals().settleFailed({0, 1, 2}); }
  bool isBack() const { return settled_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  void leave() { service_->close(std::chrono::milliseconds(0)); }

  bool hasEnded() const { return meeting_->isCompleted(); }
  bool hasMet() const { return meeting_->isCompleted() && !meeting_->failure().has_value(); }
  std::string failure() const { return meeting_->failure().has_value() ? meeting_->failure()->text : ""; }

 private:
  const int32_t rank_;
  std::unique_ptr<ReshardService> service_;
  std::shared_ptr<ReshardCall> watch_;
  std::shared_ptr<ReshardCall> meeting_;
  std::future<void> settled_;
};

class ArrivalsTest : public testing::TestWithParam<uint64_t> {
 protected:
  ArrivalsTest() : network_(kNumRanks, GetParam()), random_(GetParam()) {
    for (int32_t rank = 0; rank < kNumRanks; ++rank) {
      ranks_.push_back(std::make_unique<Rank>(rank, network_));
    }
  }
  Rank& at(size_t rank) { return *ranks_[rank]; }
  /// Some of what can happen happens.
  void goOn() {
    for (uint64_t left = random_() % 20; left > 0; --left) {
      network_.step();
    }
  }
  void expectAllMeet() {
    for (const auto& rank : ranks_) {
      rank->make({0, 1, 2});
      goOn();
    }
    network_.runUntilIdle();
    for (const auto& rank : ranks_) {
      EXPECT_TRUE(rank->hasMet()) << rank->failure();
    }
  }

  transport::FakeHostNetwork network_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

TEST_P(ArrivalsTest, RanksThatAgreeMeet) {
  expectAllMeet();
  expectAllMeet();
}

TEST_P(ArrivalsTest, RanksThatDisagreeOnTheRanksAllHearOfIt) {
  at(0).make({0, 1, 2});
  goOn();
  at(1).make({0, 1});
  goOn();
  at(2).make({0, 1, 2});
  network_.runUntilIdle();
  for (const auto& rank : ranks_) {
    EXPECT_NE(rank->failure().find("ranks disagree on meshes"), std::string::npos) << rank->failure();
  }
  expectAllMeet();
}

TEST_P(ArrivalsTest, ARankThatCouldMakeNoneIsHeardOf) {
  at(0).make({0, 1, 2});
  goOn();
  at(1).refuse({}, "a mistake on rank 1");
  goOn();
  at(2).make({0, 1, 2});
  network_.runUntilIdle();
  for (const size_t rank : {size_t{0}, size_t{2}}) {
    EXPECT_EQ(at(rank).failure(), "a mistake on rank 1");
  }
}

TEST_P(ArrivalsTest, ARankThatComesLateToAPipelineThatFailedHearsOfIt) {
  at(0).make({0, 1, 2});
  at(1).make({0, 1});
  network_.runUntilIdle();
  at(2).make({0, 1, 2});
  network_.runUntilIdle();
  for (const auto& rank : ranks_) {
    EXPECT_NE(rank->failure().find("ranks disagree on meshes"), std::string::npos) << rank->failure();
  }
  expectAllMeet();
}

TEST_P(ArrivalsTest, ARankThatCouldMakeNoneComesAgainBeforeItHearsWhichFailed) {
  for (const size_t rank : {size_t{0}, size_t{2}}) {
    at(rank).make({0, 1, 2});
    goOn();
  }
  at(1).refuse({}, "a mistake on rank 1");
  while (!at(0).hasEnded() || !at(2).hasEnded()) {
    network_.step();
  }
  for (const size_t rank : {size_t{0}, size_t{2}}) {
    EXPECT_EQ(at(rank).failure(), "a mistake on rank 1");
    at(rank).make({0, 1, 2});
    goOn();
  }
  at(1).comeBack();
  while (!at(1).isBack()) {
    network_.step();
  }
  at(1).make({0, 1, 2});
  network_.runUntilIdle();
  for (const auto& rank : ranks_) {
    EXPECT_TRUE(rank->hasMet()) << rank->failure();
  }
}

TEST_P(ArrivalsTest, NobodyWaitsForThePeersThatAreLostToComeBack) {
  at(1).refuse({}, "a mistake on rank 1");
  goOn();
  at(0).leave();
  at(1).comeBack();
  goOn();
  at(2).leave();
  network_.runUntilIdle();
  EXPECT_TRUE(at(1).isBack());
}

TEST_P(ArrivalsTest, ARankThatLeavesBeforeItArrivesIsMissed) {
  at(0).make({0, 1, 2});
  at(2).make({0, 1, 2});
  network_.runUntilIdle();
  at(1).leave();
  network_.runUntilIdle();
  for (const size_t rank : {size_t{0}, size_t{2}}) {
    EXPECT_NE(at(rank).failure().find("rank 1 is lost (it has left the group"), std::string::npos) << at(rank).failure();
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, ArrivalsTest, testing::Range<uint64_t>(0, 40));

}  // namespace
}  // namespace xmesh::runtime
