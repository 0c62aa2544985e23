#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/network_cluster.h"

namespace xmesh::transport::test {

/// A kind of network; of fakes, the seed of the order in which things come.
struct Kind {
  bool is_tcp = false;
  uint64_t seed = 0;
  bool shared_memory = true;
};

/// What every PeerNetwork promises, checked over each kind of it.
class Conformance : public testing::TestWithParam<Kind> {
 protected:
  void start(int32_t size) {
    if (GetParam().is_tcp) {
      TcpNetworkOptions options;
      options.shared_memory = GetParam().shared_memory;
      cluster_ = std::make_unique<TcpCluster>(size, options);
    } else {
      cluster_ = std::make_unique<FakeCluster>(size, GetParam().seed);
    }
  }
  void openEverywhere(OperationId operation) {
    for (int32_t rank = 0; rank < cluster_->size(); ++rank) {
      cluster_->open(rank, operation);
    }
  }
  bool waitSent(int32_t rank, OperationId operation, size_t count) {
    return cluster_->waitFor([&] { return cluster_->told(rank).sent[operation].size() >= count; });
  }
  bool waitReceived(int32_t rank, OperationId operation, size_t count) {
    return cluster_->waitFor([&] { return cluster_->told(rank).received[operation].size() >= count; });
  }
  /// Large enough to be in many frames and many socket buffers; small on the fake, where it would only cost time.
  size_t largeBytes() const { return GetParam().is_tcp || GetParam().seed == 0 ? size_t{64} << 20 : size_t{1} << 16; }
  /// A message from rank 0 to rank 1 over an operation of its own arrives.
  void expectUsable(uint64_t operation, size_t num_bytes = 3000) {
    const std::vector<char> data = randomBytes(num_bytes, operation);
    std::vector<char> got(data.size());
    cluster_->open(0, operation);
    cluster_->open(1, operation);
    cluster_->recv(1, operation, 0, got, 1);
    cluster_->send(0, operation, 1, data, 1);
    ASSERT_TRUE(waitReceived(1, operation, 1));
    ASSERT_TRUE(waitSent(0, operation, 1));
    EXPECT_EQ(got, data);
  }

  /// What the network makes at a first large message is there.
  void warmUp() {
    expectUsable(1000, 100'000);
    ASSERT_TRUE(cluster_->fenceBoth(0, 1));
  }

  std::unique_ptr<Cluster> cluster_;
};

}  // namespace xmesh::transport::test
