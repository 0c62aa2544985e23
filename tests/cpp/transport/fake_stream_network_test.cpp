#include "transport/fakes/fake_stream_network.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace xmesh::transport {
namespace {

class FakeStream : public testing::TestWithParam<uint64_t> {
 protected:
  FakeStreamNetwork network_{3, GetParam()};
};

INSTANTIATE_TEST_SUITE_P(Seeds, FakeStream, testing::Range<uint64_t>(0, 10));

TEST_P(FakeStream, MessagesAndLaunchesRunInOrder) {
  std::vector<int> src{1, 2, 3};
  std::vector<int> dst(3);
  std::vector<int> seen;
  StreamTransport& sender = network_.transport(0);
  StreamTransport& receiver = network_.transport(1);
  for (size_t i = 0; i < 3; ++i) {
    sender.enqueue([&, i](void*) { src[i] *= 10; });
    sender.enqueueSend(1, &src[i], sizeof(int));
    receiver.enqueueRecv(0, &dst[i], sizeof(int));
    receiver.enqueue([&, i](void*) { seen.push_back(dst[i]); });
  }
  EXPECT_EQ(src[0], 1);  // nothing happens before run()
  network_.run();
  EXPECT_EQ(seen, (std::vector<int>{10, 20, 30}));
}

TEST_P(FakeStream, ExchangeWithoutGroupDeadlocks) {
  int values[2] = {5, 6};
  for (const int32_t rank : {0, 1}) {
    network_.transport(rank).enqueueSend(1 - rank, &values[rank], sizeof(int));
    network_.transport(rank).enqueueRecv(1 - rank, &values[rank], sizeof(int));
  }
  try {
    network_.run();
    FAIL() << "no deadlock found";
  } catch (const StreamDeadlock& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("rank 0 waits on communicator 0 in entry 0 for send to rank 1 (4 bytes)"), std::string::npos) << text;
    EXPECT_NE(text.find("rank 1 waits on communicator 0 in entry 0 for send to rank 0 (4 bytes)"), std::string::npos) << text;
  }
}

TEST_P(FakeStream, CrossedOrderOfThreeRanksDeadlocks) {
  // Each rank receives from the next before it sends to the one before.
  int value = 0;
  int got[3] = {0, 0, 0};
  for (int32_t rank = 0; rank < 3; ++rank) {
    network_.transport(rank).enqueueRecv((rank + 1) % 3, &got[rank], sizeof(int));
    network_.transport(rank).enqueueSend((rank + 2) % 3, &value, sizeof(int));
  }
  EXPECT_THROW(network_.run(), StreamDeadlock);
}

TEST_P(FakeStream, AGroupEndsOnlyAsAWhole) {
  int value = 1;
  int got[2] = {0, 0};
  bool is_past = false;
  network_.transport(0).connectWays(std::vector<int32_t>{1, 2}, {});
  network_.transport(1).connectWays({}, std::vector<int32_t>{0});
  network_.transport(2).connectWays({}, std::vector<int32_t>{0});
  network_.transport(0).groupBegin();
  network_.transport(0).enqueueSend(1, &value, sizeof(int));
  network_.transport(0).enqueueSend(2, &value, sizeof(int));
  network_.transport(0).groupEnd();
  network_.transport(0).enqueue([&](void*) { is_past = true; });
  network_.transport(1).enqueueRecv(0, &got[0], sizeof(int));
  EXPECT_THROW(network_.run(), StreamDeadlock);
  EXPECT_EQ(got[0], 1);
  EXPECT_FALSE(is_past);
  network_.transport(2).enqueueRecv(0, &got[1], sizeof(int));
  network_.run();
  EXPECT_TRUE(is_past);
}

/// Rank 0 {sends to 1, `again` once more, receives from 2}, rank 1 {receives} then {sends to 2}, rank 2 {receives from 1} then {sends to 0}.
void enqueueATriangle(FakeStreamNetwork& network, bool again, bool are_connected) {
  static int value = 0;
  const auto group = [&](int32_t rank, const std::vector<int32_t>& sends, const std::vector<int32_t>& receives) {
    StreamTransport& transport = network.transport(rank);
    transport.groupBegin();
    for (const int32_t peer : sends) {
      transport.enqueueSend(peer, &value, sizeof(int));
    }
    for (const int32_t peer : receives) {
      transport.enqueueRecv(peer, &value, sizeof(int));
    }
    transport.groupEnd();
  };
  for (int32_t rank = 0; are_connected && rank < 3; ++rank) {
    network.transport(rank).connectWays(std::vector<int32_t>{(rank + 1) % 3}, std::vector<int32_t>{(rank + 2) % 3});
  }
  group(0, again ? std::vector<int32_t>{1, 1} : std::vector<int32_t>{1}, {2});
  group(1, {}, again ? std::vector<int32_t>{0, 0} : std::vector<int32_t>{0});
  group(1, {2}, {});
  group(2, {}, {1});
  group(2, {0}, {});
}

TEST_P(FakeStream, TheSecondMessageOfAWayWaitsForAllFirstOnes) {
  enqueueATriangle(network_, true, true);
  EXPECT_THROW(network_.run(), StreamDeadlock);
}

TEST_P(FakeStream, GroupsWhoseWaysAreNewWaitForEachOther) {
  enqueueATriangle(network_, false, false);
  EXPECT_THROW(network_.run(), StreamDeadlock);
}

TEST_P(FakeStream, ConnectedWaysWithAMessageEachGoThrough) {
  enqueueATriangle(network_, false, true);
  network_.run();
}

TEST_P(FakeStream, SizesMustMatch) {
  int64_t value = 0;
  network_.transport(0).enqueueSend(1, &value, 8);
  network_.transport(1).enqueueRecv(0, &value, 4);
  try {
    network_.run();
    FAIL() << "sizes were not compared";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "sizes differ: rank 0 has a send to rank 1 (8 bytes), rank 1 a recv from rank 0 (4 bytes)");
  }
}

TEST_P(FakeStream, MisuseThrows) {
  StreamTransport& transport = network_.transport(0);
  EXPECT_THROW(transport.groupEnd(), std::logic_error);
  EXPECT_THROW(transport.enqueueSend(0, nullptr, 0), std::invalid_argument);
  EXPECT_THROW(network_.transport(3), std::invalid_argument);
  transport.groupBegin();
  EXPECT_THROW(transport.groupBegin(), std::logic_error);
  EXPECT_THROW(transport.enqueue([](void*) {}), std::logic_error);
  EXPECT_THROW(network_.run(), std::logic_error);
}

}  // namespace
}  // namespace xmesh::transport
