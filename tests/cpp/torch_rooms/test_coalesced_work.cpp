#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "c10d/coalesced_work.h"

namespace xmesh::c10d_backend {
namespace {

using std::chrono::milliseconds;

/// A work whose state the test sets, and which counts its calls.
class Part final : public ::c10d::Work {
 public:
  bool is_completed = true;
  bool waits_well = true;
  std::exception_ptr error;
  std::vector<at::Tensor> tensors;
  std::vector<milliseconds> waits;
  milliseconds takes{0};  ///< how long a wait lasts
  int num_synchronized = 0;
  int num_aborted = 0;

  bool isCompleted() override { return is_completed; }
  bool isSuccess() const override { return error == nullptr; }
  std::exception_ptr exception() const override { return error; }
  std::vector<at::Tensor> result() override { return tensors; }
  void synchronize() override { ++num_synchronized; }
  void abort() override { ++num_aborted; }
  bool wait(milliseconds timeout) override {
    waits.push_back(timeout);
    std::this_thread::sleep_for(takes);
    if (error) {
      std::rethrow_exception(error);
    }
    return waits_well;
  }
};

class CoalescedWorkTest : public ::testing::Test {
 protected:
  std::vector<c10::intrusive_ptr<Part>> parts_ = {c10::make_intrusive<Part>(), c10::make_intrusive<Part>(), c10::make_intrusive<Part>()};
  c10::intrusive_ptr<CoalescedWork> whole_ =
      c10::make_intrusive<CoalescedWork>(std::vector<c10::intrusive_ptr<::c10d::Work>>(parts_.begin(), parts_.end()));
};

TEST_F(CoalescedWorkTest, IsCompleteWhenAllAre) {
  EXPECT_TRUE(whole_->isCompleted());
  for (const auto& part : parts_) {
    part->is_completed = false;
    EXPECT_FALSE(whole_->isCompleted());
    part->is_completed = true;
  }
}

TEST_F(CoalescedWorkTest, FailsWithTheFirstError) {
  EXPECT_TRUE(whole_->isSuccess());
  EXPECT_EQ(whole_->exception(), nullptr);
  parts_[2]->error = std::make_exception_ptr(std::runtime_error("the third"));
  EXPECT_FALSE(whole_->isSuccess());
  EXPECT_EQ(whole_->exception(), parts_[2]->error);
  parts_[1]->error = std::make_exception_ptr(std::runtime_error("the second"));
  EXPECT_EQ(whole_->exception(), parts_[1]->error);
  EXPECT_THROW(whole_->wait(milliseconds(5)), std::runtime_error);
}

TEST_F(CoalescedWorkTest, WaitsForEveryPart) {
  EXPECT_TRUE(whole_->wait(kNoTimeout));
  parts_[0]->waits_well = false;
  EXPECT_FALSE(whole_->wait(kNoTimeout));
  for (const auto& part : parts_) {
    EXPECT_EQ(part->waits, std::vector<milliseconds>({kNoTimeout, kNoTimeout}));
  }
}

TEST_F(CoalescedWorkTest, TheTimeoutIsThatOfAllParts) {
  parts_[1]->takes = milliseconds(20);
  EXPECT_TRUE(whole_->wait(milliseconds(10'000)));
  EXPECT_LE(parts_[2]->waits.at(0), parts_[1]->waits.at(0) - parts_[1]->takes);
  EXPECT_TRUE(whole_->wait(milliseconds(10)));  // the last part is looked at, though nothing is left
  EXPECT_EQ(parts_[2]->waits.at(1), milliseconds(1));
}

TEST_F(CoalescedWorkTest, ResultsKeepTheirOrder) {
  parts_[0]->tensors = {at::full({1}, 0), at::full({1}, 1)};
  parts_[2]->tensors = {at::full({1}, 2)};
  const std::vector<at::Tensor> results = whole_->result();
  ASSERT_EQ(results.size(), 3U);
  for (size_t i = 0; i < results.size(); ++i) {
    EXPECT_EQ(results[i].item<int64_t>(), static_cast<int64_t>(i));
  }
}

TEST_F(CoalescedWorkTest, SynchronizesAndAbortsEveryPart) {
  whole_->synchronize();
  whole_->abort();
  for (const auto& part : parts_) {
    EXPECT_EQ(part->num_synchronized, 1);
    EXPECT_EQ(part->num_aborted, 1);
  }
}

TEST(CoalescedWork, OfNothingIsDone) {
  CoalescedWork whole({});
  EXPECT_TRUE(whole.isCompleted());
  EXPECT_TRUE(whole.isSuccess());
  EXPECT_TRUE(whole.wait(milliseconds(5)));
  EXPECT_TRUE(whole.result().empty());
}

}  // namespace
}  // namespace xmesh::c10d_backend
