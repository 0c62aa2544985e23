#include <gtest/gtest.h>

#include <vector>

#include "core/error.h"
#include "runtime/host/staging_pool.h"

namespace xmesh::runtime {
namespace {

/// Asks for the same amount whenever told that memory is free.
class Client final : public StagingClient {
 public:
  Client(StagingPool& pool, int64_t num_bytes, std::vector<Client*>& log) : pool_(pool), num_bytes_(num_bytes), log_(log) {}
  ~Client() override {
    while (!held_.empty()) {
      giveBack();
    }
    pool_.forget(*this);
  }
  bool take() {
    const StagingBuffer buffer = pool_.acquire(StagingKind::kSend, num_bytes_, *this);
    if (buffer) {
      held_.push_back(buffer);
    }
    return static_cast<bool>(buffer);
  }
  void giveBack() {
    pool_.release(held_.back(), *this);
    held_.pop_back();
  }
  void onStagingFree() override {
    log_.push_back(this);
    take();
  }
  size_t numHeld() const { return held_.size(); }

 private:
  StagingPool& pool_;
  int64_t num_bytes_;
  std::vector<Client*>& log_;
  std::vector<StagingBuffer> held_;
};

TEST(StagingPool, KeepsEachKindInsideItsBudget) {
  StagingPool pool(8192);
  std::vector<Client*> log;
  Client client(pool, 512, log);
  for (int i = 0; i < 4; ++i) {
    EXPECT_TRUE(client.take());
  }
  EXPECT_FALSE(client.take());
  EXPECT_EQ(pool.bytesInUse(), 2048);
  client.giveBack();
  pool.serve();
  EXPECT_EQ(log, std::vector<Client*>{&client});
  EXPECT_EQ(client.numHeld(), 4U);
}

TEST(StagingPool, ServesWaitingClientsInOrder) {
  StagingPool pool(8192);
  std::vector<Client*> log;
  Client first(pool, 1024, log);
  Client second(pool, 1024, log);
  Client third(pool, 1024, log);
  EXPECT_TRUE(first.take());
  EXPECT_TRUE(first.take());
  EXPECT_TRUE(second.take()) << "one buffer is always granted";
  EXPECT_TRUE(third.take());
  EXPECT_FALSE(third.take());
  EXPECT_FALSE(second.take());
  EXPECT_FALSE(first.take());
  first.giveBack();
  pool.serve();
  EXPECT_TRUE(log.empty()) << "still over the budget";
  first.giveBack();
  second.giveBack();
  pool.serve();
  EXPECT_EQ(log, std::vector<Client*>{&third});
  third.giveBack();
  pool.serve();
  EXPECT_EQ(log, (std::vector<Client*>{&third, &second}));
}

TEST(StagingPool, NobodyOvertakesAWaitingClient) {
  StagingPool pool(8192);
  std::vector<Client*> log;
  Client large(pool, 1536, log);
  Client small(pool, 256, log);
  EXPECT_TRUE(large.take());
  EXPECT_FALSE(large.take());
  EXPECT_TRUE(small.take()) << "its first";
  EXPECT_FALSE(small.take()) << "there is room, but another one waits for more";
  large.giveBack();
  pool.serve();
  EXPECT_EQ(log, (std::vector<Client*>{&large, &small}));
}

TEST(StagingPool, KindsDoNotShareAndWhoWithdrewIsNotServed) {
  StagingPool pool(8192);
  std::vector<Client*> log;
  Client client(pool, 2048, log);
  const StagingBuffer ahead = pool.acquire(StagingKind::kSendAhead, 2048, client);
  EXPECT_TRUE(ahead);
  EXPECT_FALSE(pool.acquire(StagingKind::kSendAhead, 1, client));
  EXPECT_TRUE(client.take()) << "another kind";
  pool.withdraw(StagingKind::kSendAhead, client);
  pool.release(ahead, client);
  pool.serve();
  EXPECT_TRUE(log.empty());
}

TEST(StagingPool, GrantsOneBufferLargerThanTheBound) {
  StagingPool pool(64);
  std::vector<Client*> log;
  Client client(pool, 1 << 20, log);
  EXPECT_TRUE(client.take());
  EXPECT_FALSE(client.take());
}

TEST(StagingPool, CountsCachedMemoryAndKeepsItInsideTheBound) {
  StagingPool pool(1 << 20);
  std::vector<Client*> log;
  for (int64_t num_bytes = 1024; num_bytes <= 256 * 1024; num_bytes *= 2) {
    Client client(pool, num_bytes, log);
    while (client.take()) {
    }
  }
  EXPECT_EQ(pool.bytesInUse(), 0);
  EXPECT_LE(pool.peakBytes(), 1 << 20);
  pool.trim();
}

TEST(StagingPool, RefusesABoundOfZero) { EXPECT_THROW(StagingPool(0), core::InvalidArgument); }

}  // namespace
}  // namespace xmesh::runtime
