// What every PeerNetwork promises of messages.
#include "transport/conformance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace xmesh::transport::test {
namespace {

std::vector<Kind> kinds() {
  std::vector<Kind> kinds{{true, 0, true}, {true, 0, false}};
  for (uint64_t seed = 0; seed < 20; ++seed) {
    kinds.push_back({false, seed});
  }
  return kinds;
}

std::string kindName(const testing::TestParamInfo<Kind>& info) {
  if (!info.param.is_tcp) {
    return "Fake" + std::to_string(info.param.seed);
  }
  return info.param.shared_memory ? "Tcp" : "TcpWithoutSharedMemory";
}

INSTANTIATE_TEST_SUITE_P(Networks, Conformance, testing::ValuesIn(kinds()), kindName);

TEST_P(Conformance, SendPostedBeforeRecv) {
  start(2);
  openEverywhere(7);
  const std::vector<char> data = randomBytes(100'000, 1);
  std::vector<char> got(data.size());
  cluster_->send(0, 7, 1, data, 11);
  ASSERT_TRUE(cluster_->fence(0, 1));
  cluster_->recv(1, 7, 0, got, 12);
  ASSERT_TRUE(waitReceived(1, 7, 1));
  ASSERT_TRUE(waitSent(0, 7, 1));
  EXPECT_EQ(got, data);
  EXPECT_EQ(cluster_->told(0).sent[7], std::vector<int64_t>{11});
  EXPECT_EQ(cluster_->told(1).received[7], std::vector<int64_t>{12});
}

TEST_P(Conformance, RecvPostedBeforeSenderOpens) {
  start(2);
  cluster_->open(1, 7);
  const std::vector<char> data = randomBytes(100'000, 1);
  std::vector<char> got(data.size());
  cluster_->recv(1, 7, 0, got, 12);
  ASSERT_TRUE(cluster_->fence(1, 0));
  cluster_->open(0, 7);
  cluster_->send(0, 7, 1, data, 11);
  ASSERT_TRUE(waitReceived(1, 7, 1));
  ASSERT_TRUE(waitSent(0, 7, 1));
  EXPECT_EQ(got, data);
}

TEST_P(Conformance, KthSendMeetsKthRecv) {
  start(2);
  openEverywhere(1);
  std::vector<std::vector<char>> data;
  std::vector<std::vector<char>> got;
  for (size_t i = 0; i < 60; ++i) {
    data.push_back(randomBytes(i % 7 == 0 ? 0 : i * i * 40, i));
    got.emplace_back(data.back().size());
  }
  for (size_t i = 0; i < data.size(); ++i) {
    cluster_->send(0, 1, 1, data[i], static_cast<int64_t>(i));
    if (i >= 5) {
      cluster_->recv(1, 1, 0, got[i - 5], static_cast<int64_t>(i - 5));
    }
  }
  for (size_t i = data.size() - 5; i < data.size(); ++i) {
    cluster_->recv(1, 1, 0, got[i], static_cast<int64_t>(i));
  }
  ASSERT_TRUE(waitReceived(1, 1, data.size()));
  ASSERT_TRUE(waitSent(0, 1, data.size()));
  EXPECT_EQ(got, data);
  std::vector<int64_t> cookies(data.size());
  std::iota(cookies.begin(), cookies.end(), 0);
  EXPECT_EQ(cluster_->told(0).sent[1], cookies);
  EXPECT_EQ(cluster_->told(1).received[1], cookies);
}

TEST_P(Conformance, ZeroBytes) {
  start(2);
  openEverywhere(1);
  cluster_->call(0, [&] { cluster_->network(0).send(1, 1, nullptr, 0, 5); });
  cluster_->call(1, [&] { cluster_->network(1).recv(1, 0, nullptr, 0, 6); });
  ASSERT_TRUE(waitReceived(1, 1, 1));
  ASSERT_TRUE(waitSent(0, 1, 1));
}

TEST_P(Conformance, ManyOperationsInFlightBetweenThreeRanks) {
  start(3);
  constexpr uint64_t kOperations = 64;
  struct Pair {
    uint64_t operation;
    int32_t src;
    int32_t dst;
    std::vector<char> data;
    std::vector<char> got;
  };
  std::vector<Pair> pairs;
  std::mt19937_64 random(GetParam().seed);
  for (uint64_t operation = 1; operation <= kOperations; ++operation) {
    openEverywhere(operation);
    for (int32_t src = 0; src < 3; ++src) {
      const int32_t dst = (src + 1 + static_cast<int32_t>(random() % 2)) % 3;
      const size_t num_bytes = random() % (random() % 4 == 0 ? 3'000'000 : 20'000) / (GetParam().is_tcp ? 1 : 100);
      pairs.push_back({operation, src, dst, randomBytes(num_bytes, random()), std::vector<char>(num_bytes)});
    }
  }
  std::vector<std::pair<size_t, bool>> calls;
  for (size_t i = 0; i < pairs.size(); ++i) {
    calls.emplace_back(i, true);
    calls.emplace_back(i, false);
  }
  std::ranges::shuffle(calls, random);
  for (const auto& [index, is_send] : calls) {
    Pair& pair = pairs[index];
    is_send ? cluster_->send(pair.src, pair.operation, pair.dst, pair.data, 1) : cluster_->recv(pair.dst, pair.operation, pair.src, pair.got, 2);
  }
  ASSERT_TRUE(cluster_->waitFor([&] {
    size_t count = 0;
    for (int32_t rank = 0; rank < 3; ++rank) {
      for (uint64_t operation = 1; operation <= kOperations; ++operation) {
        count += cluster_->told(rank).received[operation].size() + cluster_->told(rank).sent[operation].size();
      }
    }
    return count == calls.size();
  }));
  for (const Pair& pair : pairs) {
    EXPECT_EQ(pair.got, pair.data) << "operation " << pair.operation << " " << pair.src << " to " << pair.dst;
  }
}

TEST_P(Conformance, LargeBothWays) {
  start(2);
  openEverywhere(1);
  const std::vector<char> data0 = randomBytes(largeBytes() + 1, 1);
  const std::vector<char> data1 = randomBytes(largeBytes() - 1, 2);
  std::vector<char> got0(data1.size());
  std::vector<char> got1(data0.size());
  cluster_->recv(0, 1, 1, got0, 1);
  cluster_->send(0, 1, 1, data0, 2);
  cluster_->send(1, 1, 0, data1, 3);
  cluster_->recv(1, 1, 0, got1, 4);
  ASSERT_TRUE(waitReceived(0, 1, 1));
  ASSERT_TRUE(waitReceived(1, 1, 1));
  ASSERT_TRUE(waitSent(0, 1, 1));
  ASSERT_TRUE(waitSent(1, 1, 1));
  EXPECT_TRUE(got0 == data1);
  EXPECT_TRUE(got1 == data0);
}

TEST_P(Conformance, AnOperationWithoutReceivesBlocksNoOther) {
  start(2);
  openEverywhere(1);
  const std::vector<char> unwanted = randomBytes(largeBytes(), 1);
  cluster_->send(0, 1, 1, unwanted, 1);
  expectUsable(2);
  EXPECT_TRUE(cluster_->told(0).sent[1].empty());
}

TEST_P(Conformance, ControlsKeepTheirOrderBesideData) {
  start(2);
  openEverywhere(1);
  const std::vector<char> data = randomBytes(largeBytes(), 1);
  std::vector<char> got(data.size());
  cluster_->recv(1, 1, 0, got, 1);
  cluster_->send(0, 1, 1, data, 1);
  std::vector<std::pair<int32_t, std::string>> expected;
  for (int i = 0; i < 500; ++i) {
    expected.emplace_back(0, std::to_string(i) + std::string(static_cast<size_t>(i), 'x'));
    cluster_->control(0, 1, expected.back().second);
  }
  expected.emplace_back(0, std::string(300'000, 'y'));
  cluster_->control(0, 1, expected.back().second);
  ASSERT_TRUE(cluster_->waitFor([&] { return cluster_->told(1).controls.size() == expected.size(); }));
  EXPECT_TRUE(cluster_->told(1).controls == expected);
  ASSERT_TRUE(waitReceived(1, 1, 1));
  ASSERT_TRUE(waitSent(0, 1, 1));
  EXPECT_TRUE(got == data);
}

}  // namespace
}  // namespace xmesh::transport::test
