#include <gtest/gtest.h>

#include <map>

#include "core/resharding/plan_resharding.h"
#include "runtime/host/pacer.h"

namespace xmesh::runtime {
namespace {

core::ReshardingPlan planOf(bool is_measured, const std::string& strategy, std::vector<core::Placement> dst) {
  core::LinkModel links;
  links.nic_bytes_per_s = 1'000'000;
  links.is_measured = is_measured;
  const core::TensorSpec src{{16, 1000}, core::DType::parse("float32"), core::Mesh({2}, {0, 1}), {core::Placement::shard(0)}};
  const core::TensorSpec target{{16, 1000}, core::DType::parse("float32"), core::Mesh({3}, {2, 3, 4}), std::move(dst)};
  return core::planResharding({{src, target}}, core::Topology::uniform(5, 1, links), core::parseStrategy(strategy));
}

/// Records what it is told to pace; carries nothing.
class PaceRecorder final : public transport::HostTransport {
 public:
  void post(std::function<void()> task) override { task(); }
  void open(transport::OperationId /*operation*/, transport::OperationEvents& /*events*/) override {}
  void send(transport::OperationId, int32_t, const void*, int64_t, int64_t) override {}
  void recv(transport::OperationId, int32_t, void*, int64_t, int64_t) override {}
  void close(transport::OperationId) override {}
  void pace(int32_t peer, int64_t bytes_per_s) override { rates[peer] = bytes_per_s; }
  std::map<int32_t, int64_t> rates;
};

TEST(Pacer, GivesEachPairItsShareOfTheBound) {
  // 16 rows on 2 senders go to 6, 6 and 4 rows: rank 0 sends 6 and 2 rows of 4,000 bytes, the bound is 8 rows out of one NIC.
  const core::ReshardingPlan plan = planOf(true, "striped", {core::Placement::shard(0)});
  const std::vector<std::pair<int64_t, int64_t>> expected = {{2, 750'000}, {3, 250'000}};
  EXPECT_EQ(pacingRates(plan, 0), expected);
  EXPECT_TRUE(pacingRates(plan, 2).empty());
}

TEST(Pacer, SendsThatRepeatAreSharesOfTheBusiestNic) {
  // Each of 3 receivers takes all: rank 0 sends its 8 rows three times, to each at a third of the rate; nothing is unequal there.
  EXPECT_TRUE(pacingRates(planOf(true, "send_recv", {core::Placement::replicate()}), 0).empty());
  const std::vector<std::pair<int64_t, int64_t>> expected = {{2, 750'000}, {3, 250'000}};
  EXPECT_EQ(pacingRates(planOf(true, "send_recv", {core::Placement::shard(0)}), 0), expected);
}

TEST(Pacer, LeavesUnmeasuredLinksAndRelaysAlone) {
  EXPECT_TRUE(pacingRates(planOf(false, "striped", {core::Placement::shard(0)}), 0).empty());
  EXPECT_TRUE(pacingRates(planOf(true, "broadcast", {core::Placement::shard(0)}), 0).empty());
  EXPECT_TRUE(pacingRates(planOf(true, "broadcast", {core::Placement::replicate()}), 0).empty());
}

TEST(Pacer, PacesOnlyTheOneCallInFlight) {
  PaceRecorder transport;
  Pacer pacer(transport);
  const Pacer::Rates rates = {{1, 100}, {2, 200}};
  pacer.callStarted(rates);
  EXPECT_EQ(transport.rates, (std::map<int32_t, int64_t>{{1, 100}, {2, 200}}));
  pacer.callStarted(rates);
  EXPECT_EQ(transport.rates, (std::map<int32_t, int64_t>{{1, 0}, {2, 0}}));
  pacer.callEnded();
  pacer.callEnded();
  pacer.callStarted(rates);
  EXPECT_EQ(transport.rates.at(2), 200);
  pacer.callEnded();
  EXPECT_EQ(transport.rates.at(2), 0);
}

}  // namespace
}  // namespace xmesh::runtime
