#include <gtest/gtest.h>

#include "runtime/agreement/inquiry.h"
#include "runtime/fake_networks.h"

namespace xmesh::runtime {
namespace {

/// The other ranks' ends: they hear questions and say nothing.
class Silent final : public transport::PeerEvents {
 public:
  void onControl(int32_t /*peer*/, std::string message) override {
    num_questions += static_cast<int>(controlKind(message) == ControlKind::kQuestion);
  }
  void onPeerLost(int32_t /*peer*/, const std::string& /*reason*/, bool /*is_goodbye*/) override {}
  int num_questions = 0;
};

class InquiryTest : public testing::Test {
 protected:
  InquiryTest() {
    for (int32_t rank = 0; rank < 3; ++rank) {
      ends_.push_back(network_.join(rank, others_));
    }
    ends_[0]->setAddress(1, "fake");
    ends_[0]->setAddress(2, "fake");
    peers_.connect(*ends_[0], "fake");
  }

  transport::FakeHostNetwork network_{3, 1};
  Silent others_;
  std::vector<std::unique_ptr<transport::PeerNetwork>> ends_;
  Peers peers_{RankNumbers({10, 11, 12}), 0};
  const Participants all_{{10, 11, 12}, {0, 1, 2}, 5, 0};
  const CallKey key_{5, 0, 0};
  Inquiry inquiry_;
};

TEST_F(InquiryTest, AsksEachOnce) {
  EXPECT_TRUE(inquiry_.begin(key_, all_, peers_));
  EXPECT_FALSE(inquiry_.begin(key_, all_, peers_));
  network_.runUntilIdle();
  EXPECT_EQ(others_.num_questions, 2);
}

TEST_F(InquiryTest, AnswersThatNobodyAskedForDoNotCount) { EXPECT_FALSE(inquiry_.hear(1, {key_, true, "is here"}, all_)); }

TEST_F(InquiryTest, BlamesTheSilentBeforeTheAbsent) {
  inquiry_.begin(key_, all_, peers_);
  EXPECT_FALSE(inquiry_.hear(1, {key_, false, "has not made this call"}, all_));
  const Failure silent = inquiry_.conclude("it took long", "half done", all_, peers_);
  EXPECT_EQ(silent.blamed_ranks, std::vector<int64_t>{12});
  EXPECT_EQ(silent.text,
            "it took long: no answer from rank [12]; here: half done; the others:\n  rank 11 has not made this call\n  rank 12 does not answer "
            "(stopped, hung or cut off)");
  EXPECT_TRUE(inquiry_.hear(2, {key_, true, "is in this call"}, all_));
  const Failure absent = inquiry_.conclude("it took long", "half done", all_, peers_);
  EXPECT_EQ(absent.blamed_ranks, std::vector<int64_t>{11});
  EXPECT_NE(absent.text.find("not called by rank [11]"), std::string::npos) << absent.text;
}

}  // namespace
}  // namespace xmesh::runtime
