// What FakeHostNetwork offers beyond PeerNetwork: its clock and its faults.
#include "transport/fakes/fake_host_network.h"

#include <gtest/gtest.h>

#include <chrono>

#include "transport/network_cluster.h"

namespace xmesh::transport::test {
namespace {

using std::chrono::milliseconds;

TEST(FakeHostNetwork, TimersFireByTheVirtualClockOnly) {
  FakeCluster cluster(1, 0);
  std::vector<int> fired;
  cluster.network(0).startTimer(milliseconds(20), [&] { fired.push_back(20); });
  cluster.network(0).startTimer(milliseconds(10), [&] { fired.push_back(10); });
  cluster.fake().runUntilIdle();
  EXPECT_TRUE(fired.empty());
  cluster.fake().advance(milliseconds(15));
  EXPECT_EQ(fired, std::vector<int>{10});
  cluster.fake().advance(milliseconds(5));
  EXPECT_EQ(fired, (std::vector<int>{10, 20}));
}

TEST(FakeHostNetwork, AKilledRankIsLostToItsContactsAtOnceAndToOthersLater) {
  FakeCluster cluster(3, 1);
  ASSERT_TRUE(cluster.fence(0, 1));
  cluster.fake().kill(1);
  cluster.fake().runUntilIdle();
  ASSERT_EQ(cluster.told(0).losses.size(), 1U);
  EXPECT_EQ(cluster.told(0).losses[0].peer, 1);
  EXPECT_FALSE(cluster.told(0).losses[0].is_goodbye);
  EXPECT_TRUE(cluster.told(2).losses.empty());
  cluster.control(2, 1, "hello?");
  cluster.control(2, 1, "hello??");
  cluster.fake().runUntilIdle();
  EXPECT_EQ(cluster.told(2).losses.size(), 1U);
  cluster.network(1).sendControl(0, "a dead rank is silent");
  cluster.fake().runUntilIdle();
  EXPECT_EQ(cluster.told(0).controls.size(), 0U);
}

TEST(FakeHostNetwork, AStoppedRankIsSilentAndGoesOnLater) {
  FakeCluster cluster(2, 2);
  cluster.fake().stop(1);
  cluster.control(0, 1, "hello");
  cluster.fake().runUntilIdle();
  EXPECT_TRUE(cluster.told(1).controls.empty());
  EXPECT_TRUE(cluster.told(0).losses.empty());
  cluster.fake().resume(1);
  cluster.fake().runUntilIdle();
  EXPECT_EQ(cluster.told(1).controls.size(), 1U);
}

TEST(FakeHostNetwork, SeedsGiveDifferentOrdersAndTheSameSeedTheSame) {
  const auto order = [](uint64_t seed) {
    FakeCluster cluster(2, seed);
    std::vector<int> order;
    for (int i = 0; i < 10; ++i) {
      cluster.network(0).post([&order, i] { order.push_back(i); });
      cluster.network(1).post([&order, i] { order.push_back(100 + i); });
    }
    cluster.fake().runUntilIdle();
    return order;
  };
  EXPECT_EQ(order(1), order(1));
  EXPECT_NE(order(1), order(2));
}

}  // namespace
}  // namespace xmesh::transport::test
