#include <gtest/gtest.h>

#include "core/resharding/decompose.h"
#include "core/resharding/simulate.h"

namespace xmesh::core {
namespace {

/// 1 MB/s NICs, 10 MB/s inside a host; times in whole microseconds.
LinkModel links() { return {.nic_bytes_per_s = 1'000'000, .local_bytes_per_s = 10'000'000, .latency_us = 7, .message_us = 3, .local_latency_us = 2}; }

/// 1,000 bytes on rank 0, needed by `needers`; one rank per host unless told otherwise.
ReshardingPlan oneSlice(const std::vector<int64_t>& needers, int64_t devices_per_host = 1) {
  const DType dtype = DType::parse("uint8");
  ReshardingPlan plan;
  plan.tensors = {{{{1000}, dtype, Mesh({1}, {0}), {Placement::replicate()}},
                   {{1000}, dtype, Mesh({static_cast<int64_t>(needers.size())}, needers), {Placement::replicate()}}}};
  plan.topology = Topology::uniform(8, devices_per_host, links());
  decompose(plan);
  return plan;
}

TEST(Simulate, OneMessagePaysItsCostAndTheLatency) {
  ReshardingPlan plan = oneSlice({1});
  plan.messages = {{0, 0, 1000, 0, 1}};
  EXPECT_DOUBLE_EQ(simulatePlan(plan).seconds, 1e-6 * (3 + 1000 + 7));
}

TEST(Simulate, APortCarriesOneMessageAtATime) {
  ReshardingPlan plan = oneSlice({1, 2});
  plan.messages = {{0, 0, 1000, 0, 1}, {0, 0, 1000, 0, 2}};
  const SimulatedPlan times = simulatePlan(plan);
  EXPECT_DOUBLE_EQ(times.start_s[1], 1e-6 * 1003);
  EXPECT_DOUBLE_EQ(times.seconds, 1e-6 * (2 * 1003 + 7));
}

TEST(Simulate, AChainOfHostsTakesKPlusPMinusTwoSteps) {
  for (const int64_t num_hosts : {2, 3, 5}) {
    for (const int64_t num_chunks : {1, 4, 10}) {
      std::vector<int64_t> needers;
      for (int64_t host = 1; host < num_hosts; ++host) {
        needers.push_back(host);
      }
      ReshardingPlan plan = oneSlice(needers);
      const int64_t chunk = 1000 / num_chunks;
      for (int64_t hop = 1; hop < num_hosts; ++hop) {
        for (int64_t begin = 0; begin < 1000; begin += chunk) {
          plan.messages.push_back({0, begin, begin + chunk, static_cast<int32_t>(hop - 1), static_cast<int32_t>(hop)});
        }
      }
      const auto steps = static_cast<double>(num_chunks + num_hosts - 2);
      EXPECT_NEAR(simulatePlan(plan).seconds, 1e-6 * (steps * static_cast<double>(3 + chunk) + static_cast<double>(7 * (num_hosts - 1))), 1e-12)
          << num_hosts << " hosts, " << num_chunks << " chunks";
    }
  }
}

TEST(Simulate, LocalHopsUseNoNic) {
  ReshardingPlan plan = oneSlice({1, 2, 3}, 2);
  plan.messages = {{0, 0, 1000, 0, 2}, {0, 0, 1000, 0, 1}, {0, 0, 1000, 2, 3}};
  const SimulatedPlan times = simulatePlan(plan);
  EXPECT_DOUBLE_EQ(times.end_s[1], 1e-6 * 102);
  EXPECT_DOUBLE_EQ(times.seconds, 1e-6 * (1010 + 102));
}

TEST(Simulate, AMessageThatIsNotReadyLetsOthersPass) {
  ReshardingPlan plan = oneSlice({1, 2, 3});
  // Rank 1 forwards to 2 what it gets late; rank 2's receive port serves rank 0's half meanwhile.
  plan.messages = {{0, 0, 1000, 0, 1}, {0, 0, 500, 1, 2}, {0, 500, 1000, 0, 2}, {0, 0, 1000, 0, 3}};
  const SimulatedPlan times = simulatePlan(plan);
  EXPECT_DOUBLE_EQ(times.start_s[2], 1e-6 * 1003);
  EXPECT_DOUBLE_EQ(times.start_s[1], 1e-6 * (1003 + 503));
}

TEST(Simulate, EachPortIsBusyAtItsOwnRate) {
  ReshardingPlan plan = oneSlice({1, 2});
  plan.topology = Topology(plan.topology.hostOfRanks(), links(), {{0, 4'000'000}});
  plan.messages = {{0, 0, 1000, 0, 1}, {0, 0, 1000, 0, 2}};
  const SimulatedPlan times = simulatePlan(plan);
  EXPECT_DOUBLE_EQ(times.start_s[1], 1e-6 * 253);
  EXPECT_DOUBLE_EQ(times.seconds, 1e-6 * (253 + 1003 + 7));
}

}  // namespace
}  // namespace xmesh::core
