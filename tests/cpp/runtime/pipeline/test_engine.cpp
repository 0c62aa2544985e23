// The engine with a runner and a traffic that only write down what they are asked.
#include <gtest/gtest.h>

#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/pipeline/generators.h"
#include "runtime/pipeline/engine.h"

namespace xmesh::runtime {
namespace {

using core::Action;
using core::ActionKind;

std::string text(const Transfer& transfer) {
  return (transfer.is_gradient ? "g" : "v") + std::to_string(transfer.edge) + "." + std::to_string(transfer.microbatch);
}

/// Writes a log that both fakes share.
class Recorder final : public ActionRunner, public BoundaryTraffic {
 public:
  void run(const Action& action) override {
    log.push_back(action.str());
    if (action.str() == fails) {
      throw std::runtime_error("no");
    }
  }
  void release(const Action& action) override { log.push_back("release " + action.str()); }
  void follow(const Action& action) override {
    log.push_back("follow " + action.str());
    if (log.back() == fails) {
      throw std::runtime_error("no");
    }
  }
  bool mayRunEarly(int32_t /*stage*/) const override { return runs_early; }
  int32_t weightsGroup(int32_t stage) const override { return has_groups ? stage : 0; }
  size_t numWeightsGroups() const override { return has_groups ? 3 : 1; }
  bool hasArrived(const Transfer& transfer) const override { return late.count(text(transfer)) == 0; }
  void postReceive(const Transfer& transfer) override {
    log.push_back("post " + text(transfer));
    posted.insert(transfer);
    peak_posted = std::max(peak_posted, posted.size());
  }
  void waitReceive(const Transfer& transfer) override {
    log.push_back("wait " + text(transfer));
    EXPECT_EQ(posted.erase(transfer) + sent.count(transfer), 1U) << text(transfer) << " was not posted";
  }
  void send(const Transfer& transfer) override {
    log.push_back("send " + text(transfer));
    sent.insert(transfer);
  }
  void flush() override { log.emplace_back("flush"); }
  void drain() override { log.emplace_back("drain"); }
  void check() const override {
    if (!log.empty() && log.back() == fails_after) {
      throw std::runtime_error("another rank's");
    }
  }

  std::vector<std::string> log;
  std::set<Transfer> posted;
  std::set<Transfer> sent;
  size_t peak_posted = 0;
  bool runs_early = false;
  bool has_groups = false;     ///< each stage adds to gradients of its own
  std::set<std::string> late;  ///< transfers that arrive only when they are waited for
  std::string fails;           ///< the action that throws
  std::string fails_after;     ///< the line after which the traffic has failed
};

std::vector<PlaceStep> middleOfThree(int32_t num_microbatches) {
  const core::Schedule schedule = core::makeSchedule("eager_1f1b", 3, num_microbatches);
  return placeProgram(schedule.actionsOf(1), {{0, 1, true, false, true}, {1, 2, true, true, false}});
}

TEST(PlaceProgram, PostsNothingThatThePlaceSendsItself) {
  const std::vector<PlaceStep> steps =
      placeProgram({{ActionKind::kForward, 1, 0}, {ActionKind::kForward, 2, 0}, {ActionKind::kBackward, 2, 0}, {ActionKind::kBackward, 1, 0}},
                   {{0, 1, true, false, true}, {1, 2, true, true, true}});
  ASSERT_EQ(steps.size(), 4U);
  EXPECT_EQ(steps[0].posted, (std::vector<Transfer>{{0, 0, false}}));
  EXPECT_EQ(steps[0].sends, (std::vector<Transfer>{{1, 0, false}}));
  EXPECT_EQ(steps[1].receives, (std::vector<Transfer>{{1, 0, false}}));
  EXPECT_TRUE(steps[1].posted.empty());
  EXPECT_EQ(steps[2].sends, (std::vector<Transfer>{{1, 0, true}}));
  EXPECT_EQ(steps[3].receives, (std::vector<Transfer>{{1, 0, true}}));
  EXPECT_TRUE(steps[3].posted.empty());
}

TEST(PlaceProgram, SendsAndReceivesWhatAnActionNeeds) {
  const std::vector<PlaceStep> steps =
      placeProgram({{ActionKind::kForward, 1, 0}, {ActionKind::kBackward, 1, 0}},
                   {{0, 1, true, false, true}, {1, 2, true, true, false}, {0, 1, false, false, true}, {2, 3, true, false, false}});
  ASSERT_EQ(steps.size(), 2U);
  EXPECT_EQ(steps[0].receives, (std::vector<Transfer>{{0, 0, false}, {2, 0, false}}));
  EXPECT_EQ(steps[0].sends, (std::vector<Transfer>{{1, 0, false}}));
  EXPECT_EQ(steps[1].receives, (std::vector<Transfer>{{1, 0, true}}));
  EXPECT_EQ(steps[1].sends, (std::vector<Transfer>{{0, 0, true}}));
  EXPECT_EQ(steps[0].posted, steps[0].receives) << "all of it comes from other places";
}

TEST(PlaceProgram, AnEdgeInsideThePlaceIsSentAndReceived) {
  const std::vector<PlaceStep> steps = placeProgram({{ActionKind::kForward, 0, 0}, {ActionKind::kForward, 1, 0}}, {{0, 1, true, true, true}});
  EXPECT_EQ(steps[0].sends, steps[1].receives);
  EXPECT_EQ(steps[0].sends.size(), 1U);
}

TEST(PlaceProgram, OfASplitBackwardTheInputGradientsCross) {
  const std::vector<PlaceEdge> edges = {{0, 1, true, false, true}, {1, 2, true, true, false}};
  const std::vector<PlaceStep> split = placeProgram({{ActionKind::kBackwardInput, 1, 0}, {ActionKind::kBackwardWeight, 1, 0}}, edges);
  const std::vector<PlaceStep> full = placeProgram({{ActionKind::kBackward, 1, 0}}, edges);
  EXPECT_EQ(split[0].receives, full[0].receives);
  EXPECT_EQ(split[0].sends, full[0].sends);
  EXPECT_TRUE(split[1].receives.empty());
  EXPECT_TRUE(split[1].sends.empty());
}

TEST(Engine, WaitsBeforeAndSendsAfterEachAction) {
  Recorder recorder;
  Engine engine({true, 0});
  engine.run(placeProgram({{ActionKind::kForward, 1, 0}, {ActionKind::kBackward, 1, 0}}, {{0, 1, true, false, true}, {1, 2, true, true, false}}),
             recorder, recorder);
  const std::vector<std::string> expected = {"post v0.0",   "flush", "wait v0.0",  "1F0",       "send v1.0", "release 1F0",
                                             "post g1.0",   "flush", "follow 1F0", "wait g1.0", "1B0",       "send g0.0",
                                             "release 1B0", "flush", "follow 1B0", "drain"};
  EXPECT_EQ(recorder.log, expected);
  ASSERT_EQ(engine.spans().size(), 4U);
  EXPECT_EQ(engine.spans()[0].kind, EngineSpan::Kind::kWait);
  EXPECT_EQ(engine.spans()[1].action.str(), "1F0");
  EXPECT_LE(engine.spans()[1].begin_ns, engine.spans()[1].end_ns);
  EXPECT_EQ(engine.describe(), "is between steps");
}

/// The actions of a list in the order in which a place with that edge runs them.
std::string orderOf(const std::string& list, const PlaceEdge& edge, bool runs_early, std::set<std::string> late, bool has_groups = false) {
  Recorder recorder;
  recorder.has_groups = has_groups;
  recorder.runs_early = runs_early;
  recorder.late = std::move(late);
  std::vector<Action> actions;
  for (size_t begin = 0; begin < list.size(); begin = list.find(' ', begin) == std::string::npos ? list.size() : list.find(' ', begin) + 1) {
    actions.push_back(Action::parse(list.substr(begin, list.find(' ', begin) - begin)));
  }
  Engine engine({true, 4});
  engine.run(placeProgram(actions, {edge}), recorder, recorder);
  std::string ran;
  for (const std::string& line : recorder.log) {
    ran += line.size() == 3 ? (ran.empty() ? "" : " ") + line : "";
  }
  return ran;
}

/// The second F's value comes late: W that are ready run before it, in the list's order and not past a B.
TEST(Engine, RunsWeightsBeforeItWaits) {
  const PlaceEdge from_another{0, 1, true, false, true};
  const std::string list = "1F0 1I0 1F1 1I1 1W0 1W1 1F2 1I2 1W2";
  EXPECT_EQ(orderOf(list, from_another, true, {}), list);
  EXPECT_EQ(orderOf(list, from_another, false, {"v0.1"}), list);
  EXPECT_EQ(orderOf(list, from_another, true, {"v0.1"}), "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2");
  EXPECT_EQ(orderOf(list, from_another, true, {"v0.2"}), list) << "both have run already";
  EXPECT_EQ(orderOf("1F0 1I0 1F1 1B1 1W0", from_another, true, {"v0.1"}), "1F0 1I0 1F1 1B1 1W0") << "B1 adds to the gradients before W0 does";
  const PlaceEdge to_another{1, 2, true, true, false};
  EXPECT_EQ(orderOf("1F0 1F1 1I0 1B1 1W0", to_another, true, {"g0.1"}), "1F0 1F1 1I0 1B1 1W0") << "so does the B that waits itself";
}

/// Segments of a stage add to gradients of their own: only the same one's B or W must come first.
TEST(Engine, RunsWeightsPastThoseOfOtherGradients) {
  const PlaceEdge from_another{0, 1, true, false, true};
  const std::string list = "1F0 2F0 2I0 1F1 1B0 2W0 1B1";
  EXPECT_EQ(orderOf(list, from_another, true, {"v0.1"}), list);
  EXPECT_EQ(orderOf(list, from_another, true, {"v0.1"}, true), "1F0 2F0 2I0 2W0 1F1 1B0 1B1");
  const std::string split = "1F0 1I0 2F0 2I0 1F1 2B1 2W0 1W0";
  EXPECT_EQ(orderOf(split, from_another, true, {"v0.1"}, true), "1F0 1I0 2F0 2I0 1W0 1F1 2B1 2W0");
}

TEST(Engine, RunsNoWeightsBeforeItWaitsForItsOwn) {
  const std::string list = "0F0 1F0 1I0 0I0 0F1 1F1 1I1 1W0 0W0 0I1 1W1 0W1";
  EXPECT_EQ(orderOf(list, {0, 1, true, true, true}, true, {"v0.0", "v0.1", "g0.0", "g0.1"}), list);
}

TEST(Engine, PostsReceivesAheadFirstNeededFirstAndBounded) {
  for (const int32_t lookahead : {0, 1, 4}) {
    Recorder recorder;
    Engine engine({true, lookahead});
    engine.run(middleOfThree(8), recorder, recorder);
    EXPECT_TRUE(recorder.posted.empty());
    EXPECT_EQ(recorder.peak_posted, static_cast<size_t>(lookahead) + 1);
    std::vector<std::string> posts;
    std::vector<std::string> waits;
    for (const std::string& line : recorder.log) {
      if (line.starts_with("post ")) {
        posts.push_back(line.substr(5));
      } else if (line.starts_with("wait ")) {
        waits.push_back(line.substr(5));
      }
    }
    EXPECT_EQ(posts, waits);
    EXPECT_EQ(posts.size(), 16U);
  }
}

TEST(Engine, WithoutOverlapEverySendIsWaitedForWithAllReceivesPosted) {
  Recorder recorder;
  Engine engine({false, 0});
  engine.run(middleOfThree(4), recorder, recorder);
  EXPECT_EQ(recorder.peak_posted, 8U);
  for (size_t i = 0; i < recorder.log.size(); ++i) {
    if (recorder.log[i].starts_with("send ")) {
      ASSERT_LT(i + 4, recorder.log.size());
      EXPECT_TRUE(recorder.log[i + 1].starts_with("release "));
      EXPECT_EQ(recorder.log[i + 2], "flush");
      EXPECT_TRUE(recorder.log[i + 3].starts_with("follow "));
      EXPECT_EQ(recorder.log[i + 4], "drain");
    }
  }
}

TEST(Engine, StartsWhatItPostedAndSentBeforeItWaitsOrComputes) {
  Recorder recorder;
  Engine engine({});
  engine.run(middleOfThree(4), recorder, recorder);
  bool is_started = true;
  for (const std::string& line : recorder.log) {
    if (line.starts_with("post ") || line.starts_with("send ")) {
      is_started = false;
    } else if (line == "flush") {
      is_started = true;
    } else if (!line.starts_with("release ")) {
      EXPECT_TRUE(is_started) << line;
    }
  }
}

TEST(Engine, TellsWhichActionFailedInWhatFollows) {
  Recorder recorder;
  recorder.fails = "follow 1B1";
  Engine engine({});
  EXPECT_THROW(engine.run(middleOfThree(4), recorder, recorder), std::runtime_error);
  ASSERT_TRUE(engine.failedAction().has_value());
  EXPECT_EQ(engine.failedAction()->str(), "1B1");
  EXPECT_EQ(engine.describe(), "is between steps");
}

TEST(Engine, TellsWhichActionFailed) {
  Recorder recorder;
  recorder.fails = "1B1";
  Engine engine({});
  EXPECT_THROW(engine.run(middleOfThree(4), recorder, recorder), std::runtime_error);
  ASSERT_TRUE(engine.failedAction().has_value());
  EXPECT_EQ(engine.failedAction()->str(), "1B1");
  EXPECT_EQ(recorder.log.back(), "1B1");
  recorder.fails.clear();
  recorder.posted.clear();
  engine.run(middleOfThree(4), recorder, recorder);
  EXPECT_FALSE(engine.failedAction().has_value());
}

TEST(Engine, BeginsNoActionOnceThePipelineHasFailed) {
  for (const std::string line : {"flush", "wait v0.1", "wait g1.0"}) {
    Recorder recorder;
    recorder.fails_after = line;
    Engine engine({true, 0});
    // The forwards of an edge's producer wait for nothing.
    const std::vector<PlaceStep> steps =
        line == "flush" ? placeProgram({{ActionKind::kForward, 0, 0}, {ActionKind::kForward, 0, 1}}, {}) : middleOfThree(4);
    EXPECT_THROW(engine.run(steps, recorder, recorder), std::runtime_error);
    EXPECT_EQ(recorder.log.back(), line);
    EXPECT_FALSE(engine.failedAction().has_value());
  }
}

}  // namespace
}  // namespace xmesh::runtime
