#include "transport/stream_conformance.h"

#include <map>
#include <random>
#include <utility>

namespace xmesh::transport::test {
namespace {

std::vector<char> bytesOf(std::mt19937_64& random, size_t num_bytes) {
  std::vector<char> out(num_bytes);
  for (char& byte : out) {
    byte = static_cast<char>(random());
  }
  return out;
}

}  // namespace

TEST_P(StreamConformance, MessagesKeepTheirOrder) {
  start(2);
  std::mt19937_64 random(1);
  std::vector<std::vector<char>> sent;
  std::vector<std::shared_ptr<void>> memory;
  std::vector<std::shared_ptr<void>> got;
  for (size_t i = 0; i < 20; ++i) {
    sent.push_back(bytesOf(random, i % 5 == 0 ? 0 : random() % 5000));
    memory.push_back(holding(sent.back()));
    got.push_back(cluster_->allocate(sent.back().size()));
    at(0).enqueueSend(1, memory.back().get(), static_cast<int64_t>(sent.back().size()));
    at(1).enqueueRecv(0, got.back().get(), static_cast<int64_t>(sent.back().size()));
  }
  ASSERT_TRUE(cluster_->run());
  for (size_t i = 0; i < sent.size(); ++i) {
    EXPECT_EQ(cluster_->read(got[i].get(), sent[i].size()), sent[i]) << i;
  }
}

TEST_P(StreamConformance, AnExchangeInOneGroupGoesThrough) {
  start(3);
  std::mt19937_64 random(2);
  std::vector<std::vector<char>> own;
  std::vector<std::shared_ptr<void>> memory;
  std::map<std::pair<int32_t, int32_t>, std::shared_ptr<void>> got;
  for (int32_t rank = 0; rank < 3; ++rank) {
    own.push_back(bytesOf(random, 1000));
    memory.push_back(holding(own.back()));
  }
  for (int32_t rank = 0; rank < 3; ++rank) {
    at(rank).groupBegin();
    for (int32_t other = 0; other < 3; ++other) {
      if (other != rank) {
        got[{rank, other}] = cluster_->allocate(1000);
        at(rank).enqueueRecv(other, got[{rank, other}].get(), 1000);
        at(rank).enqueueSend(other, memory[static_cast<size_t>(rank)].get(), 1000);
      }
    }
    at(rank).groupEnd();
  }
  ASSERT_TRUE(cluster_->run());
  for (const auto& [ends, data] : got) {
    EXPECT_EQ(cluster_->read(data.get(), 1000), own[static_cast<size_t>(ends.second)]);
  }
}

/// A relay: what a group receives is sent by the next one.
TEST_P(StreamConformance, AGroupSeesWhatTheOneBeforeReceived) {
  start(4);
  std::mt19937_64 random(3);
  const std::vector<char> whole = bytesOf(random, 1 << 16);
  const auto source = holding(whole);
  std::vector<std::shared_ptr<void>> got{nullptr};
  at(0).enqueueSend(1, source.get(), 1 << 16);
  for (int32_t rank = 1; rank < 4; ++rank) {
    got.push_back(cluster_->allocate(1 << 16));
    at(rank).enqueueRecv(rank - 1, got.back().get(), 1 << 16);
    if (rank < 3) {
      at(rank).enqueueSend(rank + 1, got.back().get(), 1 << 16);
    }
  }
  ASSERT_TRUE(cluster_->run());
  EXPECT_EQ(cluster_->read(got[3].get(), 1 << 16), whole);
}

/// In turns from each rank; what a broadcast brought is sent on.
TEST_P(StreamConformance, BroadcastsAreEntriesOfTheStream) {
  start(3);
  std::mt19937_64 random(4);
  constexpr int64_t kNumBytes = 3000;
  std::vector<std::vector<char>> own;
  std::vector<std::vector<std::shared_ptr<void>>> memory(3);  // by root, then rank
  std::vector<std::shared_ptr<void>> back;
  for (int32_t root = 0; root < 3; ++root) {
    own.push_back(bytesOf(random, kNumBytes));
    back.push_back(cluster_->allocate(kNumBytes));
    for (int32_t rank = 0; rank < 3; ++rank) {
      memory[static_cast<size_t>(root)].push_back(rank == root ? holding(own.back()) : cluster_->allocate(kNumBytes));
    }
  }
  for (int32_t root = 0; root < 3; ++root) {
    const auto& of_root = memory[static_cast<size_t>(root)];
    for (int32_t rank = 0; rank < 3; ++rank) {
      at(rank).enqueueBroadcast(root, of_root[static_cast<size_t>(rank)].get(), kNumBytes);
    }
    const int32_t next = (root + 1) % 3;
    at(next).enqueueSend(root, of_root[static_cast<size_t>(next)].get(), kNumBytes);
    at(root).enqueueRecv(next, back[static_cast<size_t>(root)].get(), kNumBytes);
  }
  ASSERT_TRUE(cluster_->run());
  for (size_t root = 0; root < 3; ++root) {
    for (size_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(cluster_->read(memory[root][rank].get(), kNumBytes), own[root]) << "rank " << rank << " of root " << root;
    }
    EXPECT_EQ(cluster_->read(back[root].get(), kNumBytes), own[root]);
  }
}

TEST_P(StreamConformance, CommunicatorsDoNotWaitForEachOther) {
  start(2);
  const auto one = holding({'a'});
  const auto other = holding({'b'});
  const auto got = cluster_->allocate(1);
  const auto got_other = cluster_->allocate(1);
  at(0, 0).enqueueSend(1, one.get(), 1);
  at(0, 1).enqueueSend(1, other.get(), 1);
  at(1, 1).enqueueRecv(0, got_other.get(), 1);  // in the other order than rank 0
  at(1, 0).enqueueRecv(0, got.get(), 1);
  ASSERT_TRUE(cluster_->run());
  EXPECT_EQ(cluster_->read(got.get(), 1), std::vector<char>{'a'});
  EXPECT_EQ(cluster_->read(got_other.get(), 1), std::vector<char>{'b'});
}

TEST_P(StreamConformance, TellsWhenItHasPassedWhatWasEnqueued) {
  start(2);
  const auto data = holding({'a'});
  const auto got = cluster_->allocate(1);
  bool is_sent = false;
  bool is_received = false;
  at(0).enqueueSend(1, data.get(), 1);
  at(0).whenReached([&](const StreamFailure* failure) { is_sent = failure == nullptr; });
  EXPECT_FALSE(is_sent);
  at(1).enqueueRecv(0, got.get(), 1);
  at(1).whenReached([&](const StreamFailure* failure) { is_received = failure == nullptr; });
  ASSERT_TRUE(cluster_->run());
  EXPECT_TRUE(is_sent);
  EXPECT_TRUE(is_received);
}

TEST_P(StreamConformance, AnAbortEndsWhatWaits) {
  start(2);
  const auto got = cluster_->allocate(1);
  std::string early;
  std::string late;
  at(1).enqueueRecv(0, got.get(), 1);
  at(1).whenReached([&](const StreamFailure* failure) { early = failure == nullptr ? "passed" : failure->reason; });
  at(1).abort({"enough", 0});
  at(1).abort({"again", 0});
  at(1).enqueueRecv(0, got.get(), 1);
  at(1).whenReached([&](const StreamFailure* failure) { late = failure == nullptr ? "passed" : failure->reason; });
  ASSERT_TRUE(cluster_->run());
  EXPECT_EQ(early, "enough");
  EXPECT_EQ(late, "enough");
}

}  // namespace xmesh::transport::test
