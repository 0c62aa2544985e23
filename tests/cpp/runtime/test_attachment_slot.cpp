#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

#include "c10d/attachment_slot.h"

namespace xmesh::c10d_backend {
namespace {

struct Counts {
  std::atomic<int> made = 0;
  std::atomic<int> closed = 0;
};

class Counted final : public GroupAttachment {
 public:
  explicit Counted(Counts& counts) : counts_(counts) { ++counts_.made; }
  void close(bool /*abort*/) noexcept override { ++counts_.closed; }

 private:
  Counts& counts_;
};

TEST(AttachmentSlot, ThreadsThatAskAtOnceGetTheSame) {
  for (int turn = 0; turn < 200; ++turn) {
    Counts counts;
    AttachmentSlot slot;
    std::barrier start(4);
    std::vector<std::shared_ptr<GroupAttachment>> got(4);
    std::vector<std::thread> threads;
    for (auto& mine : got) {
      threads.emplace_back([&] {
        start.arrive_and_wait();
        mine = slot.getOrMake([&] { return std::make_shared<Counted>(counts); });
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    EXPECT_EQ(counts.made, 1);
    for (const auto& mine : got) {
      EXPECT_NE(mine, nullptr);
      EXPECT_EQ(mine, got.front());
    }
  }
}

TEST(AttachmentSlot, WhatIsMadeWhileItClosesIsClosedOnce) {
  for (int turn = 0; turn < 200; ++turn) {
    Counts counts;
    AttachmentSlot slot;
    std::barrier start(3);
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&] {
        start.arrive_and_wait();
        slot.getOrMake([&] { return std::make_shared<Counted>(counts); });
      });
    }
    start.arrive_and_wait();
    if (const std::shared_ptr<GroupAttachment> taken = slot.close()) {
      taken->close(false);
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    EXPECT_EQ(counts.closed, counts.made);
    EXPECT_LE(counts.made, 1);
    EXPECT_EQ(slot.getOrMake([&] { return std::make_shared<Counted>(counts); }), nullptr);
    EXPECT_TRUE(slot.isClosed());
  }
}

}  // namespace
}  // namespace xmesh::c10d_backend
