// In which groups messages move on an in-order device.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/resharding/plan_resharding.h"
#include "core/resharding/strategy_registry.h"
#include "random_layouts.h"
#include "runtime/nccl_model.h"
#include "runtime/plans.h"
#include "runtime/program/broadcast_stars.h"
#include "runtime/program/message_groups.h"
#include "runtime/program/plan_checks.h"
#include "runtime/program/program_order.h"
#include "runtime/program/validate_groups.h"
#include "runtime/random_plan.h"
#include "runtime/reshard_case.h"

namespace xmesh::replay {
namespace {

using core::Message;
using runtime::GroupLimits;
using runtime::kEveryRank;
using runtime::messageGroups;
using runtime::orderedMessages;
using runtime::validateGroups;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int64_t kLayouts = 100;
#else
constexpr int64_t kLayouts = 1000;
#endif
constexpr int64_t kMuch = int64_t{1} << 40;

std::vector<int32_t> noCircles(const std::vector<Message>& ordered) { return std::vector<int32_t>(ordered.size(), -1); }

std::vector<int32_t> groupsOf(const core::ReshardingPlan& plan, int64_t max_message_bytes, const GroupLimits& limits) {
  const std::vector<Message> ordered = orderedMessages(plan, kEveryRank, max_message_bytes);
  std::vector<int32_t> groups = messageGroups(plan, ordered, noCircles(ordered), limits);
  validateGroups(plan, ordered, noCircles(ordered), groups);
  return groups;
}

/// Of one tensor, among 10 ranks.
core::ReshardingPlan hostilePlan(std::mt19937_64& rng, int64_t max_elements) {
  layouts::LayoutOptions options;
  options.num_ranks = 10;
  options.max_elements = max_elements;
  core::TensorPair pair = layouts::randomPair(rng, options);
  drawDType(rng, pair);
  return RandomPlanner({pair}, layouts::randomTopology(rng, 10), rng).plan();
}

TEST(MessageGroups, OfAPairComeOneAfterTheOther) {
  core::ReshardingPlan plan = chainPlan(12, 3, 1);
  EXPECT_EQ(groupsOf(plan, 1 << 20, {kMuch, 0}), (std::vector<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(groupsOf(chainPlan(12, 12, 1), 12, {kMuch, 0}), (std::vector<int32_t>{0, 1, 2, 3})) << "parts of one message, too";
}

TEST(MessageGroups, SmallOnesOfAPairTravelAsOne) {
  const core::ReshardingPlan plan = chainPlan(12, 3, 1);  // four of 12 bytes, which take 64 each
  EXPECT_EQ(groupsOf(plan, 1 << 20, {kMuch, 256}), (std::vector<int32_t>{0, 0, 0, 0}));
  EXPECT_EQ(groupsOf(plan, 1 << 20, {kMuch, 255}), (std::vector<int32_t>{0, 0, 0, 1}));
  EXPECT_EQ(groupsOf(plan, 1 << 20, {128, 256}), (std::vector<int32_t>{0, 0, 1, 1}));
  EXPECT_EQ(groupsOf(chainPlan(9, 3, 2), 1 << 20, {kMuch, 128}), (std::vector<int32_t>{0, 1, 0, 1, 1, 2})) << "two chunks at a time";
}

TEST(MessageGroups, AChainIsAPipeline) {
  // By chunk: 0 -> 1, 1 -> 2, 2 -> 3.
  EXPECT_EQ(groupsOf(chainPlan(9, 3, 3), 1 << 20, {kMuch, 0}), (std::vector<int32_t>{0, 1, 2, 1, 2, 3, 2, 3, 4}));
}

TEST(MessageGroups, HoldWhatStagingMemoryHolds) {
  // Eight messages of 64 bytes from one rank.
  const core::ReshardingPlan plan = transposePlan(4, 32, 1, 8);
  EXPECT_EQ(groupsOf(plan, 1 << 20, {kMuch, 0}), (std::vector<int32_t>(8, 0)));
  EXPECT_EQ(groupsOf(plan, 1 << 20, {128, 0}), (std::vector<int32_t>{0, 0, 1, 1, 2, 2, 3, 3}));
  EXPECT_EQ(groupsOf(plan, 1 << 20, {1, 0}), (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7})) << "one message always fits";
}

TEST(MessageGroups, OfARankAreThoseOfAll) {
  for (int64_t round = 0; round < 300; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    std::mt19937_64 rng(mix(7000 + static_cast<uint64_t>(round)));
    const core::ReshardingPlan plan = hostilePlan(rng, 200);
    const int64_t max_message_bytes = layouts::randomInt(rng, 1, 300);
    const std::vector<Message> all = orderedMessages(plan, kEveryRank, max_message_bytes);
    for (const int64_t rank : plan.participants()) {
      std::vector<Message> own;
      std::copy_if(all.begin(), all.end(), std::back_inserter(own), [&](const Message& message) { return runtime::involves(message, rank); });
      ASSERT_EQ(own, orderedMessages(plan, rank, max_message_bytes)) << "rank " << rank;
    }
  }
}

TEST(NcclModel, HangsWhereNcclDoes) {
  // Rank 0 sends twice to rank 1 and receives from rank 2, which does not send before rank 1 has both.
  const std::vector<Message> triangle = {valueMessage(0, 0, 1, 0, 1), valueMessage(0, 1, 2, 0, 1), valueMessage(0, 2, 3, 1, 2),
                                         valueMessage(0, 3, 4, 2, 0)};
  EXPECT_EQ(NcclModel(triangle, {0, 1, 2, 3}, 1).play(), "");
  const auto by_rank = [](int32_t rank, size_t message) { return rank == 0 || message < 2 || (rank == 2 && message == 2) ? 0 : 1; };
  EXPECT_EQ(NcclModel(triangle, by_rank, 1).play(), " 3 received 1 received 2 received");
}

std::string refusalOf(const core::ReshardingPlan& plan, const std::vector<Message>& ordered, const std::vector<int32_t>& circles,
                      const std::vector<int32_t>& groups) {
  try {
    validateGroups(plan, ordered, circles, groups);
  } catch (const core::InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST(ValidateGroups, NamesTheMessagesThatWouldWait) {
  const core::ReshardingPlan chain = chainPlan(6, 3, 2);
  const std::vector<Message> ordered = orderedMessages(chain, kEveryRank, 1 << 20);
  EXPECT_EQ(refusalOf(chain, ordered, noCircles(ordered), {0, 1, 1, 2}), "");
  EXPECT_EQ(refusalOf(chain, ordered, noCircles(ordered), {0, 1, 0, 1}), "") << "both travel as one";
  EXPECT_EQ(refusalOf(chain, ordered, noCircles(ordered), {1, 2, 0, 2}),
            "message 0 (0 -> 1, group 1) and message 2 (0 -> 1, group 0) are of one pair of ranks: in these groups they would wait for each other");
  EXPECT_NE(refusalOf(chain, ordered, noCircles(ordered), {1, 1, 2, 3}).find("rank 1 sends elements [0, 3) before it has them"), std::string::npos);
  EXPECT_EQ(
      refusalOf(chain, ordered, {-1, -1, 0, -1}, {0, 1, 1, 2}),
      "message 1 (1 -> 2, group 1) and message 2 (0 -> 1, group 1) are of a broadcast and of something else: in these groups they would wait for "
      "each other");
}

/// The group of some message changed: refused, or all messages end.
TEST(ValidateGroups, RefusesWhatWouldNotRun) {
  int64_t num_refused = 0;
  int64_t num_taken = 0;
  for (int64_t round = 0; round < 1000; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    std::mt19937_64 rng(mix(9000 + static_cast<uint64_t>(round)));
    const core::ReshardingPlan plan = hostilePlan(rng, 100);
    const std::vector<Message> ordered = orderedMessages(plan, kEveryRank, 64);
    if (ordered.empty()) {
      continue;
    }
    std::vector<int32_t> groups = messageGroups(plan, ordered, noCircles(ordered), {kMuch, layouts::randomInt(rng, 0, 1) * 256});
    const int32_t last = *std::max_element(groups.begin(), groups.end());
    groups[static_cast<size_t>(layouts::randomInt(rng, 0, static_cast<int64_t>(groups.size()) - 1))] =
        static_cast<int32_t>(layouts::randomInt(rng, 0, last + 1));
    if (!refusalOf(plan, ordered, noCircles(ordered), groups).empty()) {
      ++num_refused;
      continue;
    }
    ++num_taken;
    ASSERT_EQ(NcclModel::playJoined(ordered, groups, rng()), "");
  }
  EXPECT_GT(num_refused, 100);
  EXPECT_GT(num_taken, 100);
}

TEST(MessageGroups, EveryStrategyEndsOnUpTo64Ranks) {
  int64_t num_in_broadcasts = 0;
  for (int64_t round = 0; round < kLayouts; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    std::mt19937_64 rng(mix(11000 + static_cast<uint64_t>(round)));
    layouts::LayoutOptions options;
    options.num_ranks = layouts::randomInt(rng, 2, round % 4 == 0 ? 64 : 16);
    options.max_elements = 4096;
    options.max_extent = 64;
    const std::vector<core::TensorPair> tensors{layouts::randomPair(rng, options)};
    const core::Topology topology = layouts::randomTopology(rng, options.num_ranks);
    const int64_t max_message_bytes = layouts::randomInt(rng, 16, 1024);
    const GroupLimits limits{layouts::randomInt(rng, 0, 1) == 0 ? kMuch : 16 * max_message_bytes, layouts::randomInt(rng, 0, 1) * 1024};
    for (const auto& info : core::strategies()) {
      SCOPED_TRACE(info.name);
      const core::ReshardingPlan plan = core::planResharding(tensors, topology, core::parseStrategy(info.name));
      const std::vector<Message> ordered = orderedMessages(plan, kEveryRank, max_message_bytes);
      const std::vector<int32_t> groups = messageGroups(plan, ordered, noCircles(ordered), limits);
      ASSERT_NO_THROW(validateGroups(plan, ordered, noCircles(ordered), groups));
      ASSERT_EQ(NcclModel::playJoined(ordered, groups, rng()), "");
      const runtime::BroadcastStars stars = runtime::starsOf(plan, std::max<int64_t>(max_message_bytes, 16));
      const std::vector<Message> in_stars = orderedMessages(stars.plan, kEveryRank, std::max<int64_t>(max_message_bytes, 16));
      std::vector<int32_t> circles;
      for (const Message& message : in_stars) {
        const auto found = stars.circle.find({message.task, message.begin, message.end, message.src_rank, message.dst_rank});
        circles.push_back(message.payload != core::Payload::kValue || found == stars.circle.end() ? -1 : found->second);
        num_in_broadcasts += circles.back() >= 0 ? 1 : 0;
      }
      const std::vector<int32_t> with_stars = messageGroups(stars.plan, in_stars, circles, limits);
      ASSERT_NO_THROW(validateGroups(stars.plan, in_stars, circles, with_stars));
      ASSERT_EQ(NcclModel::playJoined(in_stars, with_stars, rng()), "");
    }
  }
  EXPECT_GT(num_in_broadcasts, 1000);
}

}  // namespace
}  // namespace xmesh::replay
