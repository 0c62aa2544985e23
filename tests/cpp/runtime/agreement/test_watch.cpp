#include <gtest/gtest.h>

#include "runtime/agreement/watch.h"

namespace xmesh::runtime {
namespace {

Failure ofPhase(uint64_t phase, const std::string& text) {
  Failure out;
  out.text = text;
  out.phase = phase;
  return out;
}

TEST(Watch, AFailureOfThisTurnIsDueAtOnce) {
  Watch watch;
  EXPECT_TRUE(watch.isDue(1, ofPhase(0, "now")));
  EXPECT_FALSE(watch.join({1, 1, 0}, 3).has_value());
  EXPECT_TRUE(watch.isDue(1, ofPhase(3, "now")));
  EXPECT_FALSE(watch.toldBy(1).has_value());
}

TEST(Watch, AFailureOfALaterTurnWaitsForIt) {
  Watch watch;
  EXPECT_FALSE(watch.isDue(2, ofPhase(2, "first")));
  EXPECT_FALSE(watch.isDue(3, ofPhase(2, "second")));
  EXPECT_FALSE(watch.join({1, 1, 0}, 1).has_value());
  EXPECT_EQ(watch.join({1, 1, 1}, 2)->text, "first");
}

TEST(Watch, WhoeverToldOfAFailureMayLeave) {
  Watch watch;
  EXPECT_FALSE(watch.isDue(2, ofPhase(2, "first")));
  EXPECT_EQ(watch.toldBy(2)->text, "first");
  EXPECT_FALSE(watch.toldBy(3).has_value());
}

TEST(Watch, KeepsTheCallsThatHaveNotLeft) {
  Watch watch;
  watch.join({1, 1, 0}, 0);
  watch.join({1, 1, 1}, 0);
  watch.leave({1, 1, 0});
  EXPECT_EQ(watch.calls(), (std::set<CallKey>{{1, 1, 1}}));
}

}  // namespace
}  // namespace xmesh::runtime
