#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "c10d/call_watch.h"
#include "c10d/collective_faults.h"
#include "c10d/guarded_work.h"
#include "transport/life_line.h"

namespace gloo {

/// Of the name that gloo's own has, which the library asks for.
struct IoException : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace gloo

namespace xmesh::c10d_backend {
namespace {

std::exception_ptr connectionError() { return std::make_exception_ptr(gloo::IoException("Connection closed by peer")); }

std::vector<int64_t> blamedBy(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const runtime::PeerError& known) {
    return known.globalRanks();
  } catch (const std::exception&) {
    return {};
  }
}

/// Three ranks of a group, global ranks 10, 11 and 12.
class CollectiveFaultsTest : public ::testing::Test {
 protected:
  CollectiveFaultsTest() {
    for (int rank = 0; rank < 3; ++rank) {
      PublishedLifeLine line = publishLifeLine(store_, rank);
      lines_.push_back(line.address);
      ranks_.push_back(std::make_shared<CollectiveFaults>(rank, std::vector<int64_t>{10, 11, 12}, std::move(line), [this] { ++num_broken_; }));
    }
    for (const auto& rank : ranks_) {
      rank->meet(store_);
    }
  }

  c10::intrusive_ptr<::c10d::Store> store_ = c10::make_intrusive<::c10d::HashStore>();
  std::atomic<int> num_broken_ = 0;
  std::vector<LifeAddress> lines_;
  std::vector<std::shared_ptr<CollectiveFaults>> ranks_;
};

TEST_F(CollectiveFaultsTest, WhoHasLeftIsNamedAndToldOf) {
  ranks_[2].reset();  // its line ends with it
  ranks_[0]->collectiveFailed(connectionError());
  EXPECT_EQ(num_broken_, 1);
  EXPECT_EQ(blamedBy(ranks_[0]->explained(connectionError(), "all_reduce", -1)), (std::vector<int64_t>{12}));
  EXPECT_THROW(ranks_[0]->check("all_reduce"), runtime::PeerError);
  ranks_[0].reset();  // the one who tells has left since, and is not to blame
  ranks_[1]->collectiveFailed(connectionError());
  EXPECT_EQ(blamedBy(ranks_[1]->explained(connectionError(), "all_reduce", -1)), (std::vector<int64_t>{12}));
}

TEST_F(CollectiveFaultsTest, WhatIsNoSignOfADeathEndsNothing) {
  const auto mistake = std::make_exception_ptr(std::runtime_error("an argument"));
  ranks_[0]->collectiveFailed(mistake);
  EXPECT_EQ(ranks_[0]->explained(mistake, "all_reduce", -1), mistake);
  ranks_[0]->collectiveFailed(connectionError());  // nobody has ended
  EXPECT_EQ(num_broken_, 0);
  EXPECT_NO_THROW(ranks_[0]->check("all_reduce"));
}

/// A collective that ends when connections are broken off for the `breaks`-th time.
class Lasting final : public ::c10d::Work {
 public:
  explicit Lasting(int breaks) : Work(-1, ::c10d::OpType::ALLREDUCE), breaks_(breaks) {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  void breakOff() {
    if (--breaks_ == 0) {
      future_->setError(connectionError());
      finish(connectionError());
    }
  }

 private:
  std::atomic<int> breaks_;
  c10::intrusive_ptr<c10::ivalue::Future> future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
};

/// It began when connections were being broken off, or before another rank told of the end, or it never ends by itself.
TEST_F(CollectiveFaultsTest, ACollectiveThatMissedTheEndOfItsGroupEnds) {
  for (const auto& [is_told, breaks] : {std::pair(false, 2), std::pair(true, 1), std::pair(false, 1'000'000)}) {
    const auto work = c10::make_intrusive<Lasting>(breaks);
    PublishedLifeLine line = publishLifeLine(store_, 0);
    const LifeAddress address = line.address;
    const auto faults = std::make_shared<CollectiveFaults>(0, std::vector<int64_t>{10, 11, 12}, std::move(line), [work] { work->breakOff(); });
    faults->meet(store_);
    watchCalls(faults);
    const auto guarded = c10::make_intrusive<GuardedWork>(work, faults, GuardedCall{"all_reduce"});
    if (breaks == 1'000'000) {  // given up on a thread of the library's own, which what a user's callback throws does not end
      guarded->getFuture()->addCallback([](c10::ivalue::Future&) { throw std::runtime_error("a user's callback"); });
    }
    if (is_told) {
      transport::LifeWatch watch(address.address);
      while (!watch.isConnected()) {
        std::this_thread::yield();
      }
      watch.tell(address.secret + " 11 rank 11 is lost");
    } else {
      faults->end({runtime::FailureKind::kPeer, "rank 11 is lost", {11}});
    }
    std::exception_ptr error;
    try {
      guarded->wait(kNoTimeout);
    } catch (...) {
      error = std::current_exception();
    }
    EXPECT_EQ(blamedBy(error), std::vector<int64_t>{11});
    const auto future = guarded->getFuture();
    future->wait();
    EXPECT_EQ(blamedBy(future->exception_ptr()), std::vector<int64_t>{11}) << "who waits for the future hears of it too";
    EXPECT_TRUE(guarded->isCompleted());
    EXPECT_FALSE(guarded->isSuccess());
    EXPECT_EQ(faults->mayHaveLostCalls(), breaks == 1'000'000);
    work->breakOff();
  }
}

/// A receive that only abort() ends.
class Receiving final : public ::c10d::Work {
 public:
  Receiving() : Work(-1, ::c10d::OpType::RECV) {}
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    is_aborted_.wait(false);
    return false;
  }
  void abort() override {
    is_aborted_.store(true);
    is_aborted_.notify_all();
  }

 private:
  std::atomic<bool> is_aborted_ = false;
};

TEST_F(CollectiveFaultsTest, AReceiveWhoseOtherEndIsGoneEnds) {
  watchCalls(ranks_[0]);
  const auto guarded = c10::make_intrusive<GuardedWork>(c10::make_intrusive<Receiving>(), ranks_[0], GuardedCall{"recv from rank 2", 2, false});
  std::exception_ptr error;
  std::thread waits([&] {
    try {
      guarded->wait(kNoTimeout);
    } catch (...) {
      error = std::current_exception();
    }
  });
  ranks_[2]->leave(/*in_order=*/false);
  waits.join();
  EXPECT_EQ(blamedBy(error), std::vector<int64_t>{12});
}

TEST_F(CollectiveFaultsTest, StrangersAreNotBelieved) {
  for (const std::string& line : {std::string("12 somebody says so"), std::string("0123456789abcdef0123456789abcdef 12 a guess"),
                                  lines_[0].secret + " 13 of no rank", lines_[0].secret + " x y", lines_[0].secret, lines_[0].secret + " "}) {
    transport::LifeWatch stranger(lines_[0].address);
    while (!stranger.isConnected()) {
      std::this_thread::yield();
    }
    stranger.tell(line);
  }
  ranks_[0]->collectiveFailed(connectionError());
  EXPECT_NO_THROW(ranks_[0]->check("all_reduce"));
}

TEST_F(CollectiveFaultsTest, AnAbortIsTold) {
  ranks_[1]->abort();
  EXPECT_EQ(num_broken_, 1);
  EXPECT_THROW(ranks_[1]->check("all_reduce"), runtime::GroupError);
  ranks_[0]->collectiveFailed(connectionError());
  EXPECT_EQ(blamedBy(ranks_[0]->explained(connectionError(), "all_reduce", -1)), (std::vector<int64_t>{11}));
}

TEST_F(CollectiveFaultsTest, AnEndFromElsewhereCutsALookShort) {
  std::thread looks([this] { ranks_[0]->collectiveFailed(connectionError()); });
  ranks_[0]->end({runtime::FailureKind::kStage, "a stage failed", {}, 1, 2});
  looks.join();
  EXPECT_THROW(std::rethrow_exception(ranks_[0]->explained(connectionError(), "all_reduce", -1)), runtime::StageError);
}

}  // namespace
}  // namespace xmesh::c10d_backend
