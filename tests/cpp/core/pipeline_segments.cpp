// Actions of stages as those of their segments.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/error.h"
#include "core/pipeline/action_table.h"
#include "core/pipeline/segments.h"
#include "core/pipeline/simulate.h"
#include "core/pipeline/validate.h"

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

constexpr const char* kOrder =
    "0.0F0,0.0F1,0.1F0,0.1F1,0.1I0,0.1B1,0.0B0,0.1W0,0.0B1\r\n"
    "1F0,1B0,1F1,1B1\r\n";

TEST(SegmentOrder, IsReadAndWritten) {
  const Schedule schedule = scheduleFromCsv(kOrder);
  EXPECT_EQ(schedule.segments, Segments({2, 1}));
  EXPECT_EQ(schedule.place_of_stage, (std::vector<int32_t>{0, 0, 1}));
  EXPECT_EQ(scheduleToCsv(schedule), kOrder);
  EXPECT_NE(schedule.str().find("csv: 2 stages on 2 places, 2 microbatches\nplace 0 (stage 0) | 0.0F0 0.0F1"), std::string::npos) << schedule.str();
  EXPECT_EQ(peakInFlight(schedule), (std::vector<int32_t>{2, 1}));
  EXPECT_EQ(scheduleToCsv(forwardsOf(schedule)), "0.0F0,0.0F1,0.1F0,0.1F1\r\n1F0,1F1\r\n");
}

TEST(SegmentOrder, IsCheckedOverItsStagesEdges) {
  const Schedule schedule = scheduleFromCsv(kOrder);
  const std::vector<StageEdge> edges = edgesOfSegments(schedule.segments, {{0, 1}});
  EXPECT_EQ(edges, (std::vector<StageEdge>{{1, 2}, {0, 1}}));
  validateSchedule(schedule, edges);
  Schedule swapped = schedule;
  std::swap(swapped.cells[0][4], swapped.cells[0][6]);
  try {
    validateSchedule(swapped, edges);
    FAIL() << "a segment's backward before that of the next one";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("0.0B0 comes before 0.1I0"), std::string::npos) << error.what();
  }
  EXPECT_THROW(edgesOfSegments(schedule.segments, {{0, 2}}), InvalidArgument);
}

TEST(SegmentOrder, OfStagesDividedRunsThemOneAfterTheOther) {
  const Schedule stages = scheduleFromCsv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1");
  const Schedule divided = dividedInto(stages, Segments({2, 1}));
  EXPECT_EQ(scheduleToCsv(divided), "0.0F0,0.1F0,0.0F1,0.1F1,0.1B0,0.0B0,0.1B1,0.0B1\r\n1F0,1B0,1F1,1B1\r\n");
  EXPECT_EQ(divided.place_of_stage, (std::vector<int32_t>{0, 0, 1}));
  EXPECT_EQ(dividedInto(divided, Segments({2, 1})), divided);
  EXPECT_EQ(dividedInto(stages, Segments({1, 1})), stages);
  EXPECT_FALSE(divided == stages);
  EXPECT_THROW(dividedInto(divided, Segments({1, 2})), InvalidArgument);
  EXPECT_THROW(dividedInto(stages, Segments({2, 1, 1})), InvalidArgument);
}

TEST(SegmentOrder, OfWhatDoesNotFitIsRefused) {
  for (const char* text : {
           "0.0F0,0F0",     // whole and divided
           "0.1F0",         // no segment 0
           "0.0F0,0.2F0",   // no segment 1
           "0.0F0,2.0F0",   // no stage 1
           "0.0F0\n0.1F0",  // on two places
           "0.F0",
           ".0F0",
           "0.0.0F0",  // no actions
           "0.2000000000F0",
           "2000000000.1F0",
       }) {
    EXPECT_THROW(scheduleFromCsv(text), InvalidArgument) << text;
  }
  EXPECT_THROW(Action::parse("0.1F0"), InvalidArgument);
}

}  // namespace
}  // namespace xmesh::core
