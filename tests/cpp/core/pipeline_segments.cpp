// Actions of stages as those of their segments.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/error.h"
#include "core/pipeline/segments.h"

namespace xmesh::core {
namespace {

std::vector<std::string> textsOf(const std::vector<Action>& actions) {
  std::vector<std::string> out;
  for (const Action& action : actions) {
    out.push_back(action.str());
  }
  return out;
}

std::vector<Action> parsed(const std::vector<std::string>& texts) {
  std::vector<Action> out;
  for (const std::string& text : texts) {
    out.push_back(Action::parse(text));
  }
  return out;
}

TEST(Segments, ForwardGoesThroughThemInOrderAndBackwardInTheOther) {
  const Segments segments({2, 1, 3});
  EXPECT_EQ(textsOf(segments.expand(parsed({"0F0", "1F0", "2F1", "2I1", "2W1", "0B0"}))),
            (std::vector<std::string>{"0F0", "1F0", "2F0", "3F1", "4F1", "5F1", "5I1", "4I1", "3I1", "5W1", "4W1", "3W1", "1B0", "0B0"}));
}

TEST(Segments, HaveTheirStagesNames) {
  const Segments segments({2, 1, 3});
  const std::vector<int32_t> stages = {0, 0, 1, 2, 2, 2};
  for (int32_t segment = 0; segment < 6; ++segment) {
    EXPECT_EQ(segments.stageOf(segment), stages[static_cast<size_t>(segment)]);
  }
  EXPECT_EQ(segments.nameOf(1), "stage 0, segment 1");
  EXPECT_EQ(segments.nameOf(2), "stage 1");
  EXPECT_EQ(segments.nameOf(Action::parse("5I7")), "2I7, segment 2");
  EXPECT_EQ(segments.nameOf(Action::parse("2I7")), "1I7");
  EXPECT_THROW(static_cast<void>(segments.stageOf(6)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(segments.expand(parsed({"3F0"}))), InvalidArgument);
  EXPECT_THROW(Segments({1, 0}), InvalidArgument);
}

TEST(Segments, AreTheStagesByDefault) {
  const Segments segments(std::vector<int32_t>{});
  EXPECT_EQ(textsOf(segments.expand(parsed({"3F0", "0W1"}))), (std::vector<std::string>{"3F0", "0W1"}));
  EXPECT_EQ(segments.nameOf(Action::parse("3F0")), "3F0");
  EXPECT_EQ(segments.nameOf(3), "stage 3");
}

}  // namespace
}  // namespace xmesh::core
