#include <gtest/gtest.h>

#include <map>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "core/resharding/plan_resharding.h"
#include "random_layouts.h"
#include "runtime/plans.h"
#include "runtime/program/program.h"
#include "runtime/program/tracks.h"

namespace xmesh::runtime {
namespace {

using core::Placement;
using replay::valueMessage;

core::ReshardingPlan manySlices() {
  return replay::emptyPlan({{replay::lineSpec({16}, "float32", {0, 1, 4, 5, 6, 7, 8, 9}, Placement::shard(0)),
                             replay::lineSpec({16}, "float32", {2, 3}, Placement::replicate())}});
}

TEST(TrackOf, WhatIsPassedOnGoesByItsSlice) {
  core::ReshardingPlan plan = replay::emptyPlan(
      {{replay::lineSpec({16}, "float32", {0, 1}, Placement::shard(0)), replay::lineSpec({16}, "float32", {2, 3}, Placement::replicate())}});
  for (const auto& held : {valueMessage(0, 0, 4, 0, 2), valueMessage(0, 4, 8, 0, 2), valueMessage(1, 0, 8, 1, 2)}) {
    EXPECT_EQ(trackOf(plan, held), 0) << "its sender has it from the start";
  }
  EXPECT_NE(trackOf(manySlices(), valueMessage(0, 0, 1, 2, 3)), trackOf(manySlices(), valueMessage(7, 0, 1, 2, 3))) << "a column of seven";
  const int32_t track = trackOf(plan, valueMessage(0, 0, 8, 2, 3));
  EXPECT_NE(track, 0);
  EXPECT_NE(trackOf(plan, valueMessage(1, 0, 4, 2, 3)), 0);
  EXPECT_NE(trackOf(plan, valueMessage(1, 0, 4, 2, 3)), track);
  EXPECT_EQ(trackOf(plan, valueMessage(1, 4, 8, 2, 3)), trackOf(plan, valueMessage(1, 0, 4, 2, 3)));
}

/// The elements of the messages from one rank to another in one track, in order.
using Traffic = std::map<std::tuple<int64_t, int64_t, int32_t>, std::vector<std::pair<int64_t, int64_t>>>;

TEST(TrackOf, BothEndsFindTheSame) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    std::mt19937_64 rng(seed);
    const core::TensorPair pair = layouts::randomPair(rng, {});
    for (const char* strategy : {"striped", "broadcast", "local_allgather", "global_allgather"}) {
      const core::ReshardingPlan plan = core::planResharding({pair}, core::Topology::uniform(12, 3), core::parseStrategy(strategy));
      Traffic sent;
      Traffic received;
      for (const int64_t rank : plan.participants()) {
        const auto program = compileProgram(plan, rank, {.max_message_bytes = 64});
        for (const SendStep& step : program->sends) {
          sent[{rank, program->peers()[static_cast<size_t>(step.peer)], step.track}].emplace_back(step.begin, step.end);
        }
        for (const ReceiveStep& step : program->receives) {
          received[{program->peers()[static_cast<size_t>(step.peer)], rank, step.track}].emplace_back(step.begin, step.end);
        }
      }
      EXPECT_EQ(sent, received) << "seed " << seed << ' ' << strategy;
    }
  }
}

}  // namespace
}  // namespace xmesh::runtime
