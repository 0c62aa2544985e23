#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "core/resharding/plan_resharding.h"
#include "core/resharding/simulate.h"
#include "core/resharding/striped/static_schedule.h"
#include "core/resharding/validate.h"

namespace xmesh::core {
namespace {

/// Replays the rounds: one send and one receive per process and round, only chunks that it has, every chunk once.
TEST(CirculantBroadcast, IsARoundOptimalSchedule) {
  for (int32_t num_processes = 1; num_processes <= 70; ++num_processes) {
    for (const int32_t num_chunks : {1, 2, 3, 7, 16}) {
      int32_t depth = 0;
      while ((1 << depth) < num_processes) {
        ++depth;
      }
      std::vector<std::vector<int32_t>> round_of(static_cast<size_t>(num_processes), std::vector<int32_t>(static_cast<size_t>(num_chunks), -1));
      std::fill(round_of[0].begin(), round_of[0].end(), 0);  // the first round in which a process may send the chunk; -1: it lacks it
      std::set<std::pair<int32_t, int32_t>> senders;
      std::set<std::pair<int32_t, int32_t>> receivers;
      size_t num_hops = 0;
      for (const BroadcastHop& hop : circulantBroadcast(num_processes, num_chunks)) {
        const int32_t since = round_of[static_cast<size_t>(hop.from)][static_cast<size_t>(hop.chunk)];
        ASSERT_TRUE(since >= 0 && since <= hop.round) << num_processes << " processes, " << num_chunks << " chunks, round " << hop.round;
        int32_t& at_receiver = round_of[static_cast<size_t>(hop.to)][static_cast<size_t>(hop.chunk)];
        ASSERT_EQ(at_receiver, -1);
        at_receiver = hop.round + 1;
        ASSERT_TRUE(senders.insert({hop.round, hop.from}).second);
        ASSERT_TRUE(receivers.insert({hop.round, hop.to}).second);
        ASSERT_LT(hop.round, num_chunks - 1 + depth);
        ++num_hops;
      }
      ASSERT_EQ(num_hops, static_cast<size_t>(num_processes - 1) * static_cast<size_t>(num_chunks));
    }
  }
}

ReshardingPlan planOn(int64_t num_src, int64_t num_dst, const Placement& src, const Placement& dst) {
  std::vector<int64_t> src_ranks(static_cast<size_t>(num_src));
  std::vector<int64_t> dst_ranks(static_cast<size_t>(num_dst));
  std::iota(src_ranks.begin(), src_ranks.end(), int64_t{0});
  std::iota(dst_ranks.begin(), dst_ranks.end(), num_src);
  const DType dtype = DType::parse("float32");
  const LinkModel links{.nic_bytes_per_s = 25'000'000, .local_bytes_per_s = 1'000'000'000, .latency_us = 0, .message_us = 0, .local_latency_us = 0};
  const TensorPair pair{{{1920, 1920}, dtype, Mesh({num_src}, src_ranks), {src}}, {{1920, 1920}, dtype, Mesh({num_dst}, dst_ranks), {dst}}};
  return planResharding({pair}, Topology::uniform(num_src + num_dst, 1, links), parseStrategy("striped:num_chunks=64"));
}

TEST(StaticSchedule, ReachesTheBoundOnManyHosts) {
  struct Shape {
    int64_t num_src;
    int64_t num_dst;
    Placement src;
    Placement dst;
    double most;
  };
  const std::vector<Shape> shapes = {
      {1, 127, Placement::replicate(), Placement::replicate(), 1 + 6.5 / 64},   // ceil(log2(128)) - 1 = 6 chunks
      {64, 64, Placement::replicate(), Placement::replicate(), 1.01},           // one holder for each
      {4, 60, Placement::replicate(), Placement::replicate(), 1 + 3.5 / 64},    // groups of 15
      {96, 96, Placement::shard(0), Placement::shard(1), 1.02},                 // all to all
      {120, 120, Placement::shard(0), Placement::replicate(), 1 + 10.0 / 64.0}  // all gather
  };
  for (const Shape& shape : shapes) {
    const ReshardingPlan plan = planOn(shape.num_src, shape.num_dst, shape.src, shape.dst);
    EXPECT_NO_THROW(validatePlan(plan));
    EXPECT_LE(plan.predicted_seconds, shape.most * plan.lower_bound_seconds) << shape.num_src << " -> " << shape.num_dst;
  }
}

constexpr double kUnevenMost = 1.06;

/// All to all between `num_src` and `num_dst` hosts of two devices: rows over the hosts become columns over the hosts, the devices share the other
/// dim, so that every host has one slice for every host.
ReshardingPlan allToAll(int64_t num_src, int64_t num_dst, int64_t first_dst, std::vector<int64_t> shape) {
  constexpr int64_t kDevices = 2;
  std::vector<int64_t> src_ranks(static_cast<size_t>(num_src * kDevices));
  std::vector<int64_t> dst_ranks(static_cast<size_t>(num_dst * kDevices));
  std::iota(src_ranks.begin(), src_ranks.end(), int64_t{0});
  std::iota(dst_ranks.begin(), dst_ranks.end(), first_dst * kDevices);
  const DType dtype = DType::parse("float32");
  const LinkModel links{
      .nic_bytes_per_s = 25'000'000, .local_bytes_per_s = 1'000'000'000'000, .latency_us = 0, .message_us = 0, .local_latency_us = 0};
  const std::vector<Placement> src = {Placement::shard(0), Placement::shard(1)};
  const std::vector<Placement> dst = {Placement::shard(1), Placement::shard(0)};
  const TensorPair pair{{shape, dtype, Mesh({num_src, kDevices}, src_ranks), src}, {shape, dtype, Mesh({num_dst, kDevices}, dst_ranks), dst}};
  return planResharding({pair}, Topology::uniform((first_dst + num_dst + num_src) * kDevices, kDevices, links), parseStrategy("striped"));
}

TEST(Rotation, AllToAllReachesTheBoundAtEverySize) {
  for (int64_t num_hosts = 3; num_hosts <= 40; ++num_hosts) {
    for (const bool is_same_mesh : {false, true}) {
      const ReshardingPlan plan = allToAll(num_hosts, num_hosts, is_same_mesh ? 0 : num_hosts, {num_hosts * 8, num_hosts * 8});
      EXPECT_NO_THROW(validatePlan(plan));
      EXPECT_LE(plan.predicted_seconds, 1.011 * plan.lower_bound_seconds) << num_hosts << " hosts, the same: " << is_same_mesh;
      EXPECT_EQ(plan.predicted_seconds, simulatePlan(plan).seconds);
    }
  }
}

/// Extents that nothing divides, and more or fewer receivers than senders: no slice is longer than the largest, so ports lose a few of these.
TEST(Rotation, UnevenAllToAllStaysNearTheBound) {
  for (int64_t num_hosts = 3; num_hosts <= 40; ++num_hosts) {
    for (const int64_t num_dst : {num_hosts, num_hosts - 1, 2 * num_hosts / 3}) {
      const ReshardingPlan plan = allToAll(num_hosts, num_dst, num_hosts, {num_hosts * 24 - 1, num_hosts * 24 - 5});
      EXPECT_NO_THROW(validatePlan(plan));
      EXPECT_LE(plan.predicted_seconds, kUnevenMost * plan.lower_bound_seconds) << num_hosts << " -> " << num_dst;
    }
  }
}

TEST(Scale, HundredsOfHostsAreBoundAndPlannedAsTheyAreSimulated) {
  const ReshardingPlan plan = allToAll(300, 300, 300, {2400, 2400});
  EXPECT_EQ(plan.tasks.size(), 90'000U);
  EXPECT_EQ(plan.messages.size(), 90'000U);
  EXPECT_NO_THROW(validatePlan(plan));
  EXPECT_EQ(plan.lower_bound_bytes, 2400 * 8 * 4);
  EXPECT_LE(plan.predicted_seconds, 1.011 * plan.lower_bound_seconds);
  EXPECT_EQ(plan.predicted_seconds, simulatePlan(plan).seconds);
}

/// Hosts gather among themselves: uneven partials, two rings side by side, replicas. With a latency of many chunks, since own partials cover it.
TEST(Ring, GathersReachTheBoundWhateverTheLatency) {
  struct Shape {
    std::vector<int64_t> mesh;
    std::vector<Placement> src;
    std::vector<Placement> dst;
    int64_t rows;
  };
  const Placement all = Placement::replicate();
  const std::vector<Shape> shapes = {
      {{5}, {Placement::shard(0)}, {all}, 1920},                                               // every host its own partial
      {{5}, {Placement::shard(0)}, {all}, 1917},                                               // of uneven partials
      {{7}, {Placement::shard(1)}, {all}, 256},                                                // runs of a row
      {{2, 4}, {all, Placement::shard(0)}, {all, all}, 1920},                                  // each partial on two hosts
      {{3, 4}, {Placement::shard(0), Placement::shard(1)}, {Placement::shard(0), all}, 1919},  // three rings
  };
  const DType dtype = DType::parse("float32");
  const LinkModel links{
      .nic_bytes_per_s = 25'000'000, .local_bytes_per_s = 1'000'000'000, .latency_us = 20'000, .message_us = 0, .local_latency_us = 0};
  for (const Shape& shape : shapes) {
    const int64_t num_hosts = std::accumulate(shape.mesh.begin(), shape.mesh.end(), int64_t{1}, std::multiplies<>());
    std::vector<int64_t> ranks(static_cast<size_t>(num_hosts));
    std::iota(ranks.begin(), ranks.end(), int64_t{0});
    const TensorPair pair{{{shape.rows, 1920}, dtype, Mesh(shape.mesh, ranks), shape.src},
                          {{shape.rows, 1920}, dtype, Mesh(shape.mesh, ranks), shape.dst}};
    const ReshardingPlan plan = planResharding({pair}, Topology::uniform(num_hosts, 1, links), parseStrategy("striped:num_chunks=256"));
    EXPECT_NO_THROW(validatePlan(plan));
    EXPECT_LE(plan.predicted_seconds, 1.005 * plan.lower_bound_seconds + 2 * 0.02) << num_hosts << " hosts, " << shape.rows << " rows";
  }
}

/// Four contributions on 64 hosts, needed in blocks: stripes stay near a chunk's size, instead of one for every slice and needing host.
TEST(Scale, PartialOnManyHostsIsNotCutToPieces) {
  std::vector<int64_t> ranks(64);
  std::iota(ranks.begin(), ranks.end(), int64_t{0});
  const DType dtype = DType::parse("float32");
  const TensorPair pair{{{512, 512}, dtype, Mesh({16, 4}, ranks), {Placement::shard(0), Placement::partial(ReduceOp::kSum)}},
                        {{512, 512}, dtype, Mesh({2, 32}, ranks), {Placement::shard(1), Placement::replicate()}}};
  const ReshardingPlan plan = planResharding({pair}, Topology::uniform(64, 1), parseStrategy("striped"));
  EXPECT_NO_THROW(validatePlan(plan));
  EXPECT_LE(plan.messages.size(), 32U * 34U * 8U);  // 32 slices, each to one reducer and 31 others, of up to 8 stripes
}

}  // namespace
}  // namespace xmesh::core
