// Calls into memory of the caller's own: no byte of it changes in a call that is refused.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "core/error.h"
#include "core/resharding/plan_resharding.h"
#include "runtime/fake_networks.h"

namespace xmesh::runtime {
namespace {

using core::Placement;

constexpr int32_t kNumRanks = 4;
constexpr int64_t kExtent = 96;

/// From ranks 0 and 1 to ranks 1, 2 and 3: rank 1 keeps a part of what it has.
core::ReshardingPlan planOf(Placement src, Placement dst) {
  const core::DType dtype = core::DType::parse("int32");
  return core::planResharding({{{{kExtent}, dtype, core::Mesh({2}, {0, 1}), {src}}, {{kExtent}, dtype, core::Mesh({3}, {1, 2, 3}), {dst}}}},
                              core::Topology::uniform(kNumRanks, 1), core::parseStrategy("broadcast"));
}

class MemoryOfCallers : public testing::TestWithParam<uint64_t> {
 protected:
  MemoryOfCallers() : network_(kNumRanks, GetParam()) {
    for (int32_t rank = 0; rank < kNumRanks; ++rank) {
      services_.push_back(hostService(network_, {0, 1, 2, 3}, rank));
      introduce(*services_.back(), rank, kNumRanks);
    }
  }

  struct Made {
    std::vector<int32_t> src;
    std::vector<int32_t> dst;
    std::shared_ptr<ReshardCall> call;
  };

  std::unique_ptr<Made> begin(int32_t rank, const core::ReshardingPlan& plan, bool is_callers) {
    auto out = std::make_unique<Made>();
    const std::shared_ptr<PreparedPlan> prepared = preparedFor(plan, rank);
    prepared->terms.fields = packFields({{"placements", plan.tensors[0].src.str() + plan.tensors[0].dst.str()}});
    ReshardRequest request;
    request.movement.src = {localIn(out->src, prepared->program->srcShape(0))};
    request.movement.dst = {localIn(out->dst, prepared->program->dstShape(0))};
    request.movement.prepared = prepared;
    request.movement.writes_once_agreed = is_callers;
    std::iota(out->src.begin(), out->src.end(), plan.tensors[0].src.placements[0] == Placement::shard(0) ? rank * kExtent / 2 : 0);
    out->call = services_[static_cast<size_t>(rank)]->reshard(std::move(request));
    return out;
  }

  transport::FakeHostNetwork network_;
  std::vector<std::unique_ptr<ReshardService>> services_;
};

TEST_P(MemoryOfCallers, StaysAsItWasWhereAnyRankDiffers) {
  for (const Placement& src : {Placement::shard(0), Placement::partial(core::ReduceOp::kSum)}) {
    for (int32_t other = 0; other < kNumRanks; ++other) {
      std::vector<std::unique_ptr<Made>> calls;
      for (int32_t rank = 0; rank < kNumRanks; ++rank) {
        calls.push_back(begin(rank, planOf(src, rank == other ? Placement::shard(0) : Placement::replicate()), true));
      }
      network_.runUntilIdle();
      for (const auto& made : calls) {
        ASSERT_TRUE(made->call->isCompleted());
        EXPECT_THROW(made->call->wait(), core::InvalidArgument);
        EXPECT_EQ(made->dst, std::vector<int32_t>(made->dst.size(), -1)) << "rank " << other << " differs";
      }
    }
  }
}

TEST_P(MemoryOfCallers, StaysAsItWasWhileSomebodyMayStillRefuse) {
  const core::ReshardingPlan plan = planOf(Placement::shard(0), Placement::replicate());
  for (int32_t last = 0; last < kNumRanks; ++last) {
    std::vector<std::unique_ptr<Made>> calls;
    for (int32_t rank = 0; rank < kNumRanks; ++rank) {
      if (rank != last) {
        calls.push_back(begin(rank, plan, true));
      }
    }
    network_.runUntilIdle();
    for (const auto& made : calls) {
      EXPECT_EQ(made->dst, std::vector<int32_t>(made->dst.size(), -1)) << "rank " << last << " has not called";
    }
    services_[static_cast<size_t>(last)]->refusals().refuse({0, 1, 2, 3}, {0, 1, 2, 3}, "wrong dtype");
    network_.runUntilIdle();
    for (const auto& made : calls) {
      ASSERT_TRUE(made->call->isCompleted());
      EXPECT_EQ(made->dst, std::vector<int32_t>(made->dst.size(), -1)) << "rank " << last << " refuses";
    }
  }
}

TEST_P(MemoryOfCallers, IsFilledWhoeverElseHasIt) {
  const core::ReshardingPlan plan = planOf(Placement::shard(0), Placement::replicate());
  std::vector<std::unique_ptr<Made>> calls;
  for (uint32_t whose = 0; whose < 1U << kNumRanks; ++whose) {
    for (int32_t rank = 0; rank < kNumRanks; ++rank) {
      calls.push_back(begin(rank, plan, (whose >> rank & 1U) != 0));
    }
  }
  network_.runUntilIdle();
  std::vector<int32_t> whole(kExtent);
  std::iota(whole.begin(), whole.end(), 0);
  for (const auto& made : calls) {
    ASSERT_TRUE(made->call->isCompleted());
    EXPECT_FALSE(made->call->failure().has_value());
    EXPECT_TRUE(made->dst.empty() || made->dst == whole);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, MemoryOfCallers, testing::Range(uint64_t{0}, uint64_t{50}));

}  // namespace
}  // namespace xmesh::runtime
