// The service with its messages on one network and its tensors on in-order streams.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/resharding/plan_resharding.h"
#include "runtime/calls/reshard_service.h"
#include "runtime/executors_by_route.h"
#include "runtime/fake_networks.h"
#include "runtime/host/host_executors.h"
#include "runtime/stream/stream_executors.h"
#include "transport/fakes/fake_host_network.h"
#include "transport/fakes/fake_stream_network.h"

namespace xmesh::runtime {
namespace {

using core::Placement;
using std::chrono::milliseconds;

constexpr int32_t kNumRanks = 4;
constexpr int64_t kExtent = 96;

core::ReshardingPlan planOf(Placement dst, const std::string& strategy) {
  const core::DType dtype = core::DType::parse("int32");
  return core::planResharding(
      {{{{kExtent}, dtype, core::Mesh({2}, {0, 1}), {Placement::shard(0)}}, {{kExtent}, dtype, core::Mesh({2}, {2, 3}), {dst}}}},
      core::Topology::uniform(kNumRanks, 1), core::parseStrategy(strategy));
}

/// Every set of ranks on the one communicator of all of them, in which an index is the rank.
class OneCommunicator final : public Communicators {
 public:
  OneCommunicator(transport::FakeStreamNetwork& streams, int32_t rank) : streams_(streams), rank_(rank) {}
  Proposal propose(const Participants& /*participants*/) override { return {own_generation, nullptr}; }
  std::shared_ptr<transport::StreamTransport> of(const Participants& /*participants*/, uint64_t generation) override {
    last_generation = generation;
    if (fails_to_make) {
      throw std::runtime_error("it cannot be made");
    }
    return {std::shared_ptr<void>(), &streams_.transport(rank_)};
  }
  void abort(const Participants& /*participants*/, uint64_t /*generation*/, const transport::StreamFailure& failure) noexcept override {
    streams_.transport(rank_).abort(failure);
  }
  bool fails_to_make = false;
  uint64_t own_generation = 1;
  uint64_t last_generation = 0;

 private:
  transport::FakeStreamNetwork& streams_;
  const int32_t rank_;
};

/// Notes what it is asked, on the stream.
struct NotedStreams final : CallerStreams {
  void waitForCaller(void* /*stream*/) override { log += "wait "; }
  void markEnd(void* /*stream*/) override { log += "end"; }
  std::string log;
};

class StreamServiceTest : public testing::TestWithParam<uint64_t> {
 protected:
  StreamServiceTest() : control_(kNumRanks, GetParam()), streams_(kNumRanks, GetParam()), random_(GetParam()) {
    for (int32_t rank = 0; rank < kNumRanks; ++rank) {
      communicators_.push_back(std::make_shared<OneCommunicator>(streams_, rank));
      orders_.push_back(std::make_shared<CallOrder>());
    }
    services_ = makeServices(control_, 0);
  }

  /// Those of a group of all ranks, which has its messages on a network of its own, and its calls in each rank's order.
  std::vector<std::unique_ptr<ReshardService>> makeServices(transport::FakeHostNetwork& control, uint64_t group) {
    std::vector<int64_t> ranks(kNumRanks);
    std::iota(ranks.begin(), ranks.end(), 0);
    std::vector<std::unique_ptr<ReshardService>> out;
    for (int32_t rank = 0; rank < kNumRanks; ++rank) {
      out.push_back(
          std::make_unique<ReshardService>(ReshardService::Options{ranks, rank}, [this, rank, group, &control](transport::PeerEvents& events) {
            std::unique_ptr<transport::PeerNetwork> joined = control.join(rank, events);
            const auto allocate = [this](int64_t num_bytes) {
              ++num_staged_;
              return std::shared_ptr<void>(::operator new(static_cast<size_t>(num_bytes)), [this](void* memory) {
                --num_staged_;
                ::operator delete(memory);
              });
            };
            const auto post = [network = joined.get()](std::function<void()> task) { network->post(std::move(task)); };
            const auto inline_line = [](const std::function<void()>& task) { task(); };
            auto make = [this, rank, group, allocate, post, inline_line](const Route& /*route*/) {
              return std::make_unique<StreamExecutors>(
                  StreamExecutors::Line{communicators_[static_cast<size_t>(rank)], kernels_, orders_[static_cast<size_t>(rank)], group}, allocate,
                  StreamExecutors::Threads{post, inline_line});
            };
            auto host = std::make_unique<HostExecutors>(*joined, int64_t{1} << 20);
            return ReshardService::Networks{std::move(joined), std::make_unique<ExecutorsByRoute>(std::move(host), std::move(make)), "fake"};
          }));
      introduce(*out.back(), rank, kNumRanks);
    }
    return out;
  }

  struct Made {
    std::vector<int32_t> src;
    std::vector<int32_t> dst;
    std::shared_ptr<int> alive = std::make_shared<int>();
    std::shared_ptr<NotedStreams> streams = std::make_shared<NotedStreams>();
    std::shared_ptr<ReshardCall> call;
  };

  std::unique_ptr<Made> begin(int32_t rank, const core::ReshardingPlan& plan, uint64_t lane = 0) {
    return begin(*services_[static_cast<size_t>(rank)], rank, plan, lane);
  }
  static std::unique_ptr<Made> begin(ReshardService& service, int32_t rank, const core::ReshardingPlan& plan, uint64_t lane = 0) {
    const auto prepared = preparedFor(plan, rank, {.groups = GroupLimits{256}});
    prepared->terms.fields = packFields({{"destination", core::placementsStr(plan.tensors[0].dst.placements)}});
    auto made = std::make_unique<Made>();
    ReshardRequest request;
    request.movement.src = {localIn(made->src, prepared->program->srcShape(0))};
    request.movement.dst = {localIn(made->dst, prepared->program->dstShape(0))};
    request.movement.keep_alive = made->alive;
    request.movement.prepared = prepared;
    request.movement.route = {1, 0};
    request.movement.caller = made->streams;
    request.lane = lane;
    std::iota(made->src.begin(), made->src.end(), rank == 1 ? kExtent / 2 : 0);
    made->call = service.reshard(std::move(request));
    return made;
  }

  /// Messages and streams go on in any order, until neither can.
  void runUntilIdle() {
    const auto step = [this] { return random_() % 2 == 0 ? control_.step() || streams_.step() : streams_.step() || control_.step(); };
    for (int pause = 0; pause < 20; ++pause) {  // who keeps others back is asked after a few milliseconds
      while (step()) {
      }
      control_.advance(milliseconds(10));
    }
    while (step()) {
    }
  }

  transport::FakeHostNetwork control_;
  transport::FakeStreamNetwork streams_;
  const std::shared_ptr<const HostKernels> kernels_ = std::make_shared<HostKernels>();
  std::mt19937_64 random_;
  int num_staged_ = 0;
  std::vector<std::shared_ptr<OneCommunicator>> communicators_;  ///< by rank, as what follows
  std::vector<std::shared_ptr<CallOrder>> orders_;
  std::vector<std::unique_ptr<ReshardService>> services_;
};

TEST_P(StreamServiceTest, CallsInFlightTogetherKeepOneOrder) {
  std::vector<std::vector<std::unique_ptr<Made>>> calls(kNumRanks);
  std::vector<core::ReshardingPlan> plans;
  for (const char* strategy : {"broadcast", "send_recv", "striped"}) {
    plans.push_back(planOf(Placement::replicate(), strategy));
    plans.push_back(planOf(Placement::shard(0), strategy));
  }
  std::vector<size_t> next(kNumRanks);
  for (size_t left = kNumRanks * plans.size(); left > 0; --left) {
    size_t rank = random_() % kNumRanks;
    while (next[rank] == plans.size()) {
      rank = (rank + 1) % kNumRanks;
    }
    calls[rank].push_back(begin(static_cast<int32_t>(rank), plans[next[rank]++]));
    for (uint64_t steps = random_() % 20; steps > 0; --steps) {
      static_cast<void>(random_() % 2 == 0 ? control_.step() : streams_.step());
    }
  }
  runUntilIdle();
  std::vector<int32_t> whole(kExtent);
  std::iota(whole.begin(), whole.end(), 0);
  for (size_t i = 0; i < plans.size(); ++i) {
    for (int32_t rank = 0; rank < kNumRanks; ++rank) {
      const Made& made = *calls[static_cast<size_t>(rank)][i];
      ASSERT_TRUE(made.call->isCompleted());
      EXPECT_FALSE(made.call->failure().has_value());
      EXPECT_EQ(made.alive.use_count(), 1) << "the tensors are free";
      EXPECT_EQ(made.streams->log, "wait end");
      if (rank >= 2) {
        const auto half = whole.begin() + (rank - 2) * kExtent / 2;
        EXPECT_EQ(made.dst, i % 2 == 0 ? whole : std::vector<int32_t>(half, half + kExtent / 2));
      }
    }
  }
  EXPECT_EQ(num_staged_, 0);
}

/// As backwards are: every rank makes them in an order of its own, and waits only for a place on its stream.
TEST_P(StreamServiceTest, CallsMadeInOtherOrdersAreEnqueuedInOne) {
  constexpr uint64_t kNumCalls = 6;
  std::vector<std::vector<uint64_t>> orders(kNumRanks, std::vector<uint64_t>(kNumCalls));
  for (std::vector<uint64_t>& order : orders) {
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
  }
  std::vector<std::unique_ptr<Made>> calls;
  std::vector<size_t> next(kNumRanks);
  for (size_t left = kNumRanks * kNumCalls; left > 0; --left) {
    size_t rank = random_() % kNumRanks;
    while (next[rank] == kNumCalls) {
      rank = (rank + 1) % kNumRanks;
    }
    const uint64_t name = orders[rank][next[rank]++];
    calls.push_back(begin(static_cast<int32_t>(rank), planOf(Placement::replicate(), name % 2 == 0 ? "broadcast" : "send_recv"), 1 + name));
    for (uint64_t steps = random_() % 20; steps > 0; --steps) {
      static_cast<void>(random_() % 2 == 0 ? control_.step() : streams_.step());
    }
  }
  runUntilIdle();
  std::vector<int32_t> whole(kExtent);
  std::iota(whole.begin(), whole.end(), 0);
  for (const auto& made : calls) {
    ASSERT_TRUE(made->call->isCompleted()) << "the streams wait for each other";
    EXPECT_FALSE(made->call->failure().has_value());
    EXPECT_TRUE(made->dst.empty() || made->dst == whole);
  }
}

/// Ranks 0 and 1 make the last call only when the device has done all before, ranks 2 and 3 at once.
TEST_P(StreamServiceTest, NoCallWaitsForOneThatIsMadeWhenItHasEnded) {
  constexpr uint64_t kNumCalls = 6;
  const core::ReshardingPlan plan = planOf(Placement::replicate(), "broadcast");
  std::vector<std::unique_ptr<Made>> calls;
  for (int32_t rank = 0; rank < kNumRanks; ++rank) {
    std::vector<uint64_t> order(kNumCalls);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    for (const uint64_t name : order) {
      calls.push_back(begin(rank, plan, 1 + name));
    }
    if (rank >= 2) {
      calls.push_back(begin(rank, plan));
    }
    for (uint64_t steps = random_() % 20; steps > 0; --steps) {
      static_cast<void>(random_() % 2 == 0 ? control_.step() : streams_.step());
    }
  }
  runUntilIdle();
  for (size_t i = 0; i < 2 * kNumCalls; ++i) {
    ASSERT_TRUE(calls[i]->call->isCompleted()) << "of rank 0 or 1";
  }
  for (int32_t rank = 0; rank < 2; ++rank) {
    calls.push_back(begin(rank, plan));
  }
  runUntilIdle();
  for (const auto& made : calls) {
    ASSERT_TRUE(made->call->isCompleted());
    EXPECT_FALSE(made->call->failure().has_value());
  }
}

TEST_P(StreamServiceTest, NothingIsEnqueuedForCallsThatDiffer) {
  std::vector<std::unique_ptr<Made>> calls;
  for (int32_t rank = 0; rank < kNumRanks; ++rank) {
    calls.push_back(begin(rank, planOf(rank == 2 ? Placement::shard(0) : Placement::replicate(), "broadcast")));
  }
  runUntilIdle();
  for (const auto& made : calls) {
    ASSERT_TRUE(made->call->isCompleted());
    EXPECT_NE(made->call->failure()->text.find("ranks disagree on destination"), std::string::npos) << made->call->failure()->text;
    EXPECT_EQ(made->alive.use_count(), 1);
  }
  for (int32_t rank = 0; rank < kNumRanks; ++rank) {
    calls[static_cast<size_t>(rank)] = begin(rank, planOf(Placement::replicate(), "broadcast"));
  }
  runUntilIdle();
  for (const auto& made : calls) {
    EXPECT_FALSE(made->call->failure().has_value());
  }
}

/// Rank 3 dies when its part is not enqueued: the others fail and give up what is on their streams, which frees its memory.
TEST_P(StreamServiceTest, AFailureGivesUpWhatIsEnqueued) {
  std::vector<std::unique_ptr<Made>> calls;
  for (int32_t rank = 0; rank < kNumRanks; ++rank) {
    calls.push_back(begin(rank, planOf(Placement::replicate(), "broadcast")));
  }
  control_.stop(3);  // it has begun, and enqueues nothing
  while (control_.step()) {
  }
  control_.kill(3);
  while (control_.step()) {
  }
  for (int32_t rank = 0; rank < 3; ++rank) {
    const Made& made = *calls[static_cast<size_t>(rank)];
    ASSERT_TRUE(made.call->isCompleted());
    EXPECT_EQ(made.call->failure()->blamed_ranks, std::vector<int64_t>{3});
    EXPECT_EQ(made.alive.use_count(), 1) << "the tensors are free";
    EXPECT_TRUE(streams_.isEmpty(rank));
  }
  EXPECT_EQ(num_staged_, 0);
}

TEST_P(StreamServiceTest, AllTakeTheNewestCommunicatorThatOneOfThemSays) {
  communicators_[GetParam() % kNumRanks]->own_generation = 7;
  std::vector<std::unique_ptr<Made>> calls;
  for (int32_t rank = 0; rank < kNumRanks; ++rank) {
    calls.push_back(begin(rank, planOf(Placement::replicate(), "broadcast")));
  }
  while (control_.step()) {
  }
  for (const auto& communicators : communicators_) {
    EXPECT_EQ(communicators->last_generation, 7U);
  }
  runUntilIdle();
}

TEST_P(StreamServiceTest, WhoWaitsForAPlaceOnTheStreamWaitsForNothingElse) {
  std::vector<std::unique_ptr<Made>> calls;
  for (int32_t rank = 0; rank < kNumRanks; ++rank) {
    calls.push_back(begin(rank, planOf(Placement::replicate(), "broadcast")));
  }
  EXPECT_FALSE(calls[0]->call->waitEnqueued(milliseconds(1))) << "the ranks have not agreed";
  while (control_.step()) {
  }
  for (const auto& made : calls) {
    EXPECT_TRUE(made->call->waitEnqueued());
    EXPECT_FALSE(made->call->isCompleted()) << "the streams have not moved";
  }
  runUntilIdle();
  for (const auto& made : calls) {
    EXPECT_TRUE(made->call->wait());
  }
}

TEST_P(StreamServiceTest, AStreamThatBreaksOffBlamesThePeer) {
  std::vector<std::unique_ptr<Made>> calls;
  for (int32_t rank = 0; rank < kNumRanks; ++rank) {
    calls.push_back(begin(rank, planOf(Placement::replicate(), "broadcast")));
  }
  while (control_.step()) {
  }
  streams_.transport(1).abort({"the wire was cut", 2});
  while (control_.step()) {
  }
  for (const auto& made : calls) {
    ASSERT_TRUE(made->call->isCompleted());
    EXPECT_NE(made->call->failure()->text.find("the wire was cut"), std::string::npos) << made->call->failure()->text;
    EXPECT_EQ(made->call->failure()->blamed_ranks, std::vector<int64_t>{2});
    EXPECT_EQ(made->alive.use_count(), 1);
  }
}

TEST_P(StreamServiceTest, ACommunicatorThatCannotBeMadeFailsTheCallOnAll) {
  std::vector<std::unique_ptr<Made>> calls;
  for (int32_t rank = 0; rank < kNumRanks; ++rank) {
    calls.push_back(begin(rank, planOf(Placement::replicate(), "broadcast")));
  }
  communicators_[2]->fails_to_make = true;
  while (control_.step()) {
  }
  for (const auto& made : calls) {
    ASSERT_TRUE(made->call->isCompleted());
    EXPECT_NE(made->call->failure()->text.find("it cannot be made"), std::string::npos) << made->call->failure()->text;
    EXPECT_EQ(made->alive.use_count(), 1);
  }
}

/// Messages of one group may be early where those of the other are late. Both groups' calls meet their counterparts on the stream by order alone.
TEST_P(StreamServiceTest, CallsOfTwoGroupsKeepOneOrder) {
  transport::FakeHostNetwork other_control(kNumRanks, GetParam() + 1);
  std::vector<std::unique_ptr<ReshardService>> others = makeServices(other_control, 1);
  const std::vector<core::ReshardingPlan> plans = {planOf(Placement::replicate(), "broadcast"), planOf(Placement::shard(0), "send_recv")};
  std::vector<std::unique_ptr<Made>> calls;
  for (int32_t rank = 0; rank < kNumRanks; ++rank) {
    std::vector<size_t> of_group = {0, 0, 0, 0, 1, 1, 1, 1};
    std::shuffle(of_group.begin(), of_group.end(), random_);
    for (const size_t group : of_group) {
      calls.push_back(begin(*(group == 0 ? services_ : others)[static_cast<size_t>(rank)], rank, plans[group]));
    }
  }
  for (int pause = 0; pause < 40; ++pause) {
    const uint64_t first = random_() % 3;  // goes as far as it can before the others do
    const auto step = [&](uint64_t which) { return which == 0 ? control_.step() : which == 1 ? other_control.step() : streams_.step(); };
    for (uint64_t steps = random_() % 40; steps > 0 && step(first); --steps) {
    }
    if (pause >= 20) {
      while (step(first) || step((first + 1) % 3) || step((first + 2) % 3)) {
      }
    }
    control_.advance(milliseconds(10));
    other_control.advance(milliseconds(10));
  }
  for (const auto& made : calls) {
    ASSERT_TRUE(made->call->isCompleted());
    EXPECT_FALSE(made->call->failure().has_value());
    for (size_t i = 0; i < made->dst.size(); ++i) {
      EXPECT_EQ(made->dst[i] % (kExtent / 2), static_cast<int32_t>(i) % (kExtent / 2));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, StreamServiceTest, testing::Range<uint64_t>(0, 40));

}  // namespace
}  // namespace xmesh::runtime
