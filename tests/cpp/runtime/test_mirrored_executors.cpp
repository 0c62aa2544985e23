// A call through host memory of which one rank has tensors on a device: what is copied when, and what becomes of it when the call or the device
// fails.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/resharding/plan_resharding.h"
#include "runtime/calls/reshard_service.h"
#include "runtime/fake_networks.h"
#include "runtime/host/host_executors.h"
#include "runtime/host/mirrored_executors.h"
#include "transport/fakes/fake_host_network.h"

namespace xmesh::runtime {
namespace {

using core::Placement;
using std::chrono::milliseconds;

constexpr int64_t kExtent = 64;

core::ReshardingPlan plan() {
  const core::DType dtype = core::DType::parse("int32");
  return core::planResharding(
      {{{{kExtent}, dtype, core::Mesh({2}, {0, 1}), {Placement::shard(0)}}, {{kExtent}, dtype, core::Mesh({1}, {2}), {Placement::replicate()}}}},
      core::Topology::uniform(3, 1), core::parseStrategy("send_recv"));
}

/// Memory "on a device", and its mirror. The test says when the device is done.
struct ManualMirrors final : Mirrors {
  void fetch(Told told) override {
    EXPECT_FALSE(fetched);
    fetched = std::move(told);
  }
  void store(std::function<void()> enqueued, Told told) override {
    EXPECT_FALSE(stored);
    enqueued();
    stored = std::move(told);
  }
  void giveUp() noexcept override { is_given_up = true; }
  /// The device has copied the source.
  void endFetch() {
    src_mirror = src;
    std::exchange(fetched, nullptr)(nullptr);
  }
  void endStore() {
    dst = dst_mirror;
    std::exchange(stored, nullptr)(nullptr);
  }
  std::vector<int32_t> src;
  std::vector<int32_t> src_mirror;
  std::vector<int32_t> dst;
  std::vector<int32_t> dst_mirror;
  Told fetched;  ///< what is waited for now
  Told stored;
  bool is_given_up = false;
};

/// Ranks 0 and 1 have a half each, rank 2 gets the whole. The tensors of some are on a device.
class MirroredExecutorsTest : public testing::Test {
 protected:
  MirroredExecutorsTest() : network_(3, 1) {
    for (int32_t rank = 0; rank < 3; ++rank) {
      services_.push_back(
          std::make_unique<ReshardService>(ReshardService::Options{RankNumbers({0, 1, 2}), rank}, [this, rank](transport::PeerEvents& events) {
            std::unique_ptr<transport::PeerNetwork> joined = network_.join(rank, events);
            auto host = std::make_unique<HostExecutors>(*joined, int64_t{1} << 20);
            auto make = [network = joined.get(), on_host = host.get()](const Route& /*route*/) {
              return std::make_unique<MirroredExecutors>(*on_host, [network](std::function<void()> task) { network->post(std::move(task)); });
            };
            return ReshardService::Networks{std::move(joined), std::make_unique<ExecutorsByRoute>(std::move(host), std::move(make)), "fake"};
          }));
      introduce(*services_.back(), rank, 3);
    }
  }

  struct Made {
    std::shared_ptr<ManualMirrors> memory = std::make_shared<ManualMirrors>();
    std::shared_ptr<ReshardCall> call;
  };

  Made begin(int32_t rank, bool is_on_device) {
    const auto prepared = preparedFor(plan(), rank);
    Made out;
    ManualMirrors& memory = *out.memory;
    ReshardRequest request;
    request.timeout = milliseconds(5000);
    request.movement.src = {localIn(is_on_device ? memory.src_mirror : memory.src, prepared->program->srcShape(0))};
    request.movement.dst = {localIn(is_on_device ? memory.dst_mirror : memory.dst, prepared->program->dstShape(0))};
    if (rank < 2) {
      memory.src.resize(kExtent / 2);
      std::iota(memory.src.begin(), memory.src.end(), rank * kExtent / 2);
    }
    request.movement.prepared = prepared;
    request.movement.writes_once_agreed = true;
    if (is_on_device) {
      request.movement.route = {1, 0, true};
      request.movement.mirrors = out.memory;
    }
    out.call = services_.at(static_cast<size_t>(rank))->reshard(std::move(request));
    return out;
  }

  static std::vector<int32_t> whole() {
    std::vector<int32_t> out(kExtent);
    std::iota(out.begin(), out.end(), 0);
    return out;
  }

  transport::FakeHostNetwork network_;
  std::vector<std::unique_ptr<ReshardService>> services_;
};

TEST_F(MirroredExecutorsTest, SourceOnADevice) {
  const Made source = begin(0, true);
  network_.runUntilIdle();
  EXPECT_FALSE(source.memory->fetched) << "nothing is copied before the ranks have agreed";
  const Made other = begin(1, false);
  const Made target = begin(2, false);
  network_.runUntilIdle();
  ASSERT_TRUE(source.memory->fetched);
  EXPECT_FALSE(target.call->isCompleted());
  source.memory->endFetch();
  network_.runUntilIdle();
  EXPECT_EQ(target.memory->dst, whole());
  ASSERT_TRUE(target.call->isCompleted());
  ASSERT_TRUE(source.memory->stored) << "the end of a call is the mirrors' to tell, also where nothing is copied back";
  EXPECT_FALSE(source.call->isCompleted());
  source.memory->endStore();
  network_.runUntilIdle();
  EXPECT_TRUE(source.call->isCompleted() && other.call->isCompleted());
  EXPECT_FALSE(source.call->failure().has_value());
}

TEST_F(MirroredExecutorsTest, DestinationOnADevice) {
  const Made first = begin(0, false);
  const Made second = begin(1, true);
  const Made target = begin(2, true);
  network_.runUntilIdle();
  target.memory->endFetch();
  network_.runUntilIdle();
  EXPECT_FALSE(target.memory->stored) << "a half is missing";
  second.memory->endFetch();
  network_.runUntilIdle();
  ASSERT_TRUE(target.memory->stored);
  EXPECT_TRUE(target.call->waitEnqueued(milliseconds(1)));
  EXPECT_FALSE(target.call->isCompleted());
  target.memory->endStore();
  second.memory->endStore();
  network_.runUntilIdle();
  EXPECT_TRUE(target.call->isCompleted() && second.call->isCompleted());
  EXPECT_EQ(target.memory->dst, whole());
}

TEST_F(MirroredExecutorsTest, ADeviceThatFailsFailsTheCallWhereItIsNotDone) {
  const Made first = begin(0, true);
  const Made second = begin(1, false);
  const Made target = begin(2, false);
  network_.runUntilIdle();
  const std::string reason = "out of order";
  std::exchange(first.memory->fetched, nullptr)(&reason);
  network_.runUntilIdle();
  for (const Made* made : {&first, &target}) {
    ASSERT_TRUE(made->call->isCompleted());
    ASSERT_TRUE(made->call->failure().has_value());
    EXPECT_NE(made->call->failure()->text.find("out of order"), std::string::npos) << made->call->failure()->text;
    EXPECT_EQ(made->call->failure()->blamed_ranks, std::vector<int64_t>{0});
  }
}

TEST_F(MirroredExecutorsTest, AFailedCallOutlivesItsCopy) {
  Made first = begin(0, true);
  const Made second = begin(1, false);
  const Made target = begin(2, false);
  network_.runUntilIdle();
  network_.advance(milliseconds(5001));
  network_.runUntilIdle();
  network_.advance(milliseconds(2001));
  network_.runUntilIdle();
  ASSERT_TRUE(first.call->isCompleted());
  EXPECT_TRUE(first.call->failure().has_value());
  EXPECT_TRUE(first.memory->is_given_up);
  EXPECT_GT(first.memory.use_count(), 1) << "the device still uses the mirrors";
  first.memory->endFetch();
  network_.runUntilIdle();
  EXPECT_EQ(target.memory->dst.front(), -1) << "nothing is sent any more";
  EXPECT_EQ(target.memory->dst.back(), kExtent - 1) << "of the rank on the host";
  EXPECT_EQ(first.memory.use_count(), 1);
}

TEST_F(MirroredExecutorsTest, NothingIsAskedOfAClosedGroup) {
  const Made first = begin(0, true);
  const Made second = begin(1, false);
  const Made target = begin(2, false);
  network_.runUntilIdle();
  services_.at(0)->close(milliseconds(0));
  first.memory->endFetch();
  network_.runUntilIdle();
  ASSERT_TRUE(first.call->isCompleted());
  EXPECT_TRUE(first.call->failure().has_value());
}

}  // namespace
}  // namespace xmesh::runtime
