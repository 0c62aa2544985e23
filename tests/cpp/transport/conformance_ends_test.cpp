// What every PeerNetwork promises of operations that end early, of callbacks, tasks, goodbyes and misuse.
#include <gtest/gtest.h>

#include <algorithm>

#include "transport/conformance.h"

namespace xmesh::transport::test {
namespace {

TEST_P(Conformance, SenderClosesInTheMiddle) {
  start(2);
  warmUp();
  openEverywhere(1);
  std::vector<char> data = randomBytes(largeBytes(), 1);
  std::vector<char> got(data.size());
  cluster_->recv(1, 1, 0, got, 1);
  ASSERT_TRUE(cluster_->fence(1, 0));
  bool is_closed = false;
  cluster_->call(0, [&] {
    PeerNetwork& network = cluster_->network(0);
    network.send(1, 1, data.data(), static_cast<int64_t>(data.size()), 1);
    // The second task runs after a turn in which something was written.
    network.post([&] {
      network.post([&] {
        network.close(1);
        std::ranges::fill(data, 'z');  // the buffer is the caller's again
        is_closed = true;
      });
    });
  });
  ASSERT_TRUE(cluster_->fenceBoth(0, 1));
  expectUsable(2);
  cluster_->call(0, [&] { EXPECT_TRUE(is_closed); });
  cluster_->close(1, 1);
  if (GetParam().is_tcp) {  // the fake may have been through before the close
    EXPECT_TRUE(cluster_->told(1).received[1].empty());
    EXPECT_TRUE(cluster_->told(0).sent[1].empty());
  }
}

TEST_P(Conformance, ReceiverClosesInTheMiddle) {
  start(2);
  warmUp();
  openEverywhere(1);
  const std::vector<char> data = randomBytes(largeBytes(), 1);
  std::vector<char> got(data.size());
  cluster_->recv(1, 1, 0, got, 1);
  ASSERT_TRUE(cluster_->fence(1, 0));
  cluster_->call(0, [&] {
    cluster_->network(0).send(1, 1, data.data(), static_cast<int64_t>(data.size()), 1);
    cluster_->network(0).sendControl(1, "under way");
  });
  ASSERT_TRUE(cluster_->waitFor([&] { return !cluster_->told(1).controls.empty(); }));
  const std::vector<char> other(data.size(), 'z');
  cluster_->call(1, [&] {
    cluster_->network(1).close(1);
    got = other;
  });
  ASSERT_TRUE(cluster_->fenceBoth(0, 1));
  expectUsable(2);
  cluster_->call(1, [&] { EXPECT_TRUE(got == other); });
  cluster_->close(0, 1);
}

TEST_P(Conformance, ClosedOperationsHearNothing) {
  start(2);
  for (uint64_t operation = 1; operation <= 100; ++operation) {
    openEverywhere(operation);
    const std::vector<char> data = randomBytes(64, operation);
    std::vector<char> got(data.size());
    cluster_->recv(1, operation, 0, got, 1);
    cluster_->send(0, operation, 1, data, 1);
    size_t num_told = 0;
    cluster_->call(1, [&] {
      cluster_->network(1).close(operation);
      num_told = cluster_->told(1).received[operation].size();
    });
    cluster_->close(0, operation);
    ASSERT_TRUE(cluster_->fenceBoth(0, 1));
    EXPECT_EQ(cluster_->told(1).received[operation].size(), num_told);
  }
  EXPECT_TRUE(cluster_->told(0).losses.empty());
  EXPECT_TRUE(cluster_->told(1).losses.empty());
}

/// Answers every number with the next one from inside the callback, and closes there at the end.
class PingPong final : public OperationEvents {
 public:
  PingPong(PeerNetwork& network, int32_t peer, int64_t num_rounds) : network_(network), peer_(peer), num_rounds_(num_rounds) {}
  void begin(bool is_first) {
    network_.open(1, *this);
    network_.recv(1, peer_, &in_, sizeof(in_), 0);
    if (is_first) {
      network_.send(1, peer_, &out_, sizeof(out_), 0);
    }
  }
  void onSent(int64_t /*cookie*/) override {
    if (out_ == num_rounds_) {
      finish();
    }
  }
  void onReceived(int64_t /*cookie*/) override {
    if (in_ == num_rounds_) {
      finish();
      return;
    }
    out_ = in_ + 1;
    network_.recv(1, peer_, &in_, sizeof(in_), 0);
    network_.send(1, peer_, &out_, sizeof(out_), 0);
  }

 private:
  void finish() {
    network_.close(1);
    network_.sendControl(peer_, "done");
  }

  PeerNetwork& network_;
  const int32_t peer_;
  const int64_t num_rounds_;
  int64_t in_ = 0;
  int64_t out_ = 0;
};

TEST_P(Conformance, CallbacksMayCallBackIn) {
  start(2);
  constexpr int64_t kRounds = 1000;
  PingPong first(cluster_->network(0), 1, kRounds);
  PingPong second(cluster_->network(1), 0, kRounds);
  cluster_->call(0, [&] { first.begin(true); });
  cluster_->call(1, [&] { second.begin(false); });
  ASSERT_TRUE(cluster_->waitFor([&] { return cluster_->told(0).controls.size() == 1 && cluster_->told(1).controls.size() == 1; }));
}

TEST_P(Conformance, TasksAndTimersRunInOrder) {
  start(2);
  std::vector<int> order;
  cluster_->call(0, [&] {
    PeerNetwork& network = cluster_->network(0);
    const uint64_t canceled = network.startTimer(std::chrono::milliseconds(1), [&] { order.push_back(-1); });
    network.startTimer(std::chrono::milliseconds(30), [&] {
      order.push_back(4);
      network.sendControl(1, "timers are through");
    });
    network.startTimer(std::chrono::milliseconds(5), [&] { order.push_back(3); });
    network.cancelTimer(canceled);
    network.cancelTimer(canceled);
    network.post([&] { order.push_back(1); });
    network.post([&] { order.push_back(2); });
  });
  ASSERT_TRUE(cluster_->waitFor([&] { return !cluster_->told(1).controls.empty(); }));
  cluster_->call(0, [&] { EXPECT_EQ(order, (std::vector<int>{1, 2, 3, 4})); });
}

TEST_P(Conformance, GoodbyeIsToldOnceAndAfterWhatWasSaid) {
  start(3);
  openEverywhere(1);
  const std::vector<char> data = randomBytes(5000, 1);
  std::vector<char> got(data.size());
  cluster_->recv(1, 1, 0, got, 1);
  cluster_->send(0, 1, 1, data, 1);
  ASSERT_TRUE(waitReceived(1, 1, 1));
  cluster_->control(0, 1, "last words");
  ASSERT_TRUE(cluster_->fence(0, 1));
  ASSERT_TRUE(cluster_->fence(2, 0));  // rank 2 only talks to rank 0, never the reverse
  cluster_->leave(0);
  for (const int32_t rank : {1, 2}) {
    ASSERT_TRUE(cluster_->waitFor([&] { return !cluster_->told(rank).losses.empty(); })) << rank;
    EXPECT_EQ(cluster_->told(rank).losses[0].peer, 0);
    EXPECT_TRUE(cluster_->told(rank).losses[0].is_goodbye) << cluster_->told(rank).losses[0].reason;
  }
  EXPECT_EQ(cluster_->told(1).controls.front().second, "last words");
  // What names the lost rank is taken and comes to nothing; the others are as they were.
  cluster_->open(1, 2);
  cluster_->recv(1, 2, 0, got, 1);
  cluster_->send(1, 2, 0, data, 1);
  cluster_->control(1, 0, "nobody hears this");
  ASSERT_TRUE(cluster_->fenceBoth(1, 2));
  EXPECT_EQ(cluster_->told(1).losses.size(), 1U);
  EXPECT_EQ(cluster_->told(2).losses.size(), 1U);
}

TEST_P(Conformance, GoodbyeFollowsWordsOnAConnectionThatIsBeingMade) {
  for (const bool is_known_by_peer : {false, true}) {
    start(2);
    if (is_known_by_peer) {
      ASSERT_TRUE(cluster_->fence(1, 0));  // the peer's connection is there, this rank's own is not
    }
    cluster_->control(0, 1, "first and last words");
    cluster_->leave(0);
    ASSERT_TRUE(cluster_->waitFor([&] { return !cluster_->told(1).losses.empty(); }));
    EXPECT_TRUE(cluster_->told(1).losses[0].is_goodbye) << cluster_->told(1).losses[0].reason;
    ASSERT_EQ(cluster_->told(1).controls.size(), 1U);
    EXPECT_EQ(cluster_->told(1).controls[0].second, "first and last words");
    cluster_.reset();
  }
}

TEST_P(Conformance, SizesThatDifferLoseThePeerAtBothEnds) {
  for (const size_t num_bytes : {size_t{10}, size_t{100'000}}) {
    start(2);
    openEverywhere(1);
    const std::vector<char> data = randomBytes(num_bytes, 1);
    std::vector<char> got(num_bytes - 1);
    cluster_->recv(1, 1, 0, got, 1);
    cluster_->send(0, 1, 1, data, 1);
    for (const int32_t rank : {0, 1}) {
      ASSERT_TRUE(cluster_->waitFor([&] { return !cluster_->told(rank).losses.empty(); })) << rank;
      const Told::Loss& loss = cluster_->told(rank).losses[0];
      EXPECT_EQ(loss.peer, 1 - rank);
      EXPECT_FALSE(loss.is_goodbye);
      EXPECT_NE(loss.reason.find("protocol error"), std::string::npos) << loss.reason;
      EXPECT_NE(loss.reason.find("has " + std::to_string(num_bytes) + " bytes"), std::string::npos) << loss.reason;
      EXPECT_NE(loss.reason.find("expects " + std::to_string(num_bytes - 1)), std::string::npos) << loss.reason;
    }
    EXPECT_TRUE(cluster_->told(1).received[1].empty());
    cluster_.reset();
  }
}

TEST_P(Conformance, MisuseThrows) {
  start(2);
  openEverywhere(1);
  cluster_->call(0, [&] {
    PeerNetwork& network = cluster_->network(0);
    char byte = 0;
    EXPECT_THROW(network.open(1, cluster_->recorder(0).operation(1)), std::logic_error);
    EXPECT_THROW(network.send(9, 1, &byte, 1, 0), std::logic_error);
    EXPECT_THROW(network.recv(9, 1, &byte, 1, 0), std::logic_error);
    EXPECT_THROW(network.send(1, 0, &byte, 1, 0), std::invalid_argument);
    EXPECT_THROW(network.recv(1, 2, &byte, 1, 0), std::logic_error);
    EXPECT_THROW(network.sendControl(-1, ""), std::invalid_argument);
    network.close(1);
    network.close(1);
    EXPECT_THROW(network.open(1, cluster_->recorder(0).operation(1)), std::logic_error);
    EXPECT_TRUE(network.hasAddress(1));
  });
}

}  // namespace
}  // namespace xmesh::transport::test
