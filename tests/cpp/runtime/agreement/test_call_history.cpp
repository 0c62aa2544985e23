#include <gtest/gtest.h>

#include "runtime/agreement/call_history.h"

namespace xmesh::runtime {
namespace {

Failure saying(const std::string& text) {
  Failure out;
  out.text = text;
  return out;
}

TEST(CallHistory, CallsAreNumberedPerParticipants) {
  CallHistory history;
  history.start({7, 0, 2});
  EXPECT_TRUE(history.isPast({7, 0, 1}));
  EXPECT_TRUE(history.isPast({7, 0, 2}));
  EXPECT_FALSE(history.isPast({7, 0, 3}));
  EXPECT_FALSE(history.isPast({8, 0, 0}));
}

TEST(CallHistory, OutsideOfLaneZeroOnlyFailuresArePast) {
  CallHistory history;
  history.start({7, 5, 0});
  EXPECT_FALSE(history.isPast({7, 5, 0}));
  history.fail({7, 5, 0}, saying("no"));
  EXPECT_TRUE(history.isPast({7, 5, 0}));
}

TEST(CallHistory, TheFirstFailureCounts) {
  CallHistory history;
  history.fail({7, 0, 0}, saying("first"));
  history.fail({7, 0, 0}, saying("second"));
  ASSERT_NE(history.failureOf({7, 0, 0}), nullptr);
  EXPECT_EQ(history.failureOf({7, 0, 0})->text, "first");
}

TEST(CallHistory, ForgetsTheOldestFailures) {
  CallHistory history;
  for (uint64_t count = 0; count < 10'000; ++count) {
    history.fail({7, 0, count}, saying("no"));
  }
  EXPECT_EQ(history.failureOf({7, 0, 0}), nullptr);
  EXPECT_NE(history.failureOf({7, 0, 9'999}), nullptr);
}

TEST(CallHistory, NewsWaitForTheirCall) {
  CallHistory history;
  history.start({7, 0, 0});
  EXPECT_EQ(history.newsFor({7, 0, 0}), nullptr);
  history.newsFor({7, 0, 1})->failure = saying("early");
  history.newsFor({7, 0, 1})->notices.emplace_back(3, CallNotice{});
  EXPECT_EQ(history.early().size(), 1U);
  const EarlyNews news = history.takeNews({7, 0, 1});
  EXPECT_EQ(news.failure->text, "early");
  EXPECT_EQ(news.notices.size(), 1U);
  EXPECT_FALSE(history.takeNews({7, 0, 1}).failure.has_value());
}

TEST(CallHistory, NewsAreBounded) {
  CallHistory history;
  uint64_t count = 0;
  while (history.newsFor({7, 0, count}) != nullptr) {
    ASSERT_LT(++count, 1U << 20U);
  }
  EXPECT_EQ(history.early().size(), count);
}

}  // namespace
}  // namespace xmesh::runtime
