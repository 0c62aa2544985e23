#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "core/error.h"
#include "core/json.h"
#include "core/resharding/fingerprint.h"
#include "core/resharding/plan_json.h"
#include "core/resharding/plan_resharding.h"
#include "core/resharding/plan_text.h"
#include "published_cases.h"
#include "random_layouts.h"
#include "runtime/random_plan.h"

namespace xmesh::core {
namespace {

std::string complaint(const std::string& text) {
  try {
    planFromJson(text);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

ReshardingPlan publishedPlan(size_t index, const std::string& strategy) {
  const layouts::PublishedCase published = layouts::publishedCases()[index];
  return planResharding({layouts::pairOf(published)}, layouts::topologyOf(published), parseStrategy(strategy));
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(PlanJson, RoundTrips) {
  for (uint64_t seed = 0; seed < 500; ++seed) {
    std::mt19937_64 rng(seed);
    std::vector<TensorPair> tensors = {layouts::randomPair(rng), layouts::randomPair(rng)};
    if (seed % 3 == 0) {
      layouts::drawBoxes(rng, tensors.front());
    }
    const ReshardingPlan plan =
        planResharding(std::move(tensors), layouts::randomTopology(rng, 12), parseStrategy(seed % 2 == 0 ? "broadcast:naive+dfs,seed=3" : "auto"));
    const std::string text = planToJson(plan);
    const ReshardingPlan read = planFromJson(text);
    ASSERT_EQ(planToJson(read), text) << "seed " << seed;
    ASSERT_EQ(read.messages, plan.messages);
    ASSERT_EQ(read.tasks, plan.tasks);
    ASSERT_EQ(read.tensors, plan.tensors);
    ASSERT_EQ(read.topology, plan.topology);
    ASSERT_EQ(read.predicted_seconds, plan.predicted_seconds);
    ASSERT_EQ(planFingerprint(read), planFingerprint(plan));
  }
}

TEST(PlanJson, KeepsPartialSums) {
  int64_t num_sums = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    std::mt19937_64 rng(seed);
    const ReshardingPlan plan = replay::RandomPlanner({layouts::randomPair(rng)}, layouts::randomTopology(rng, 12), rng).plan();
    const std::string text = planToJson(plan);
    const ReshardingPlan read = planFromJson(replaced(text, "\"random\"", "\"striped\""));
    ASSERT_EQ(read.messages, plan.messages) << "seed " << seed;
    for (const Message& message : plan.messages) {
      if (message.payload == Payload::kPartialSum && num_sums++ == 0) {
        EXPECT_NE(complaint(replaced(replaced(text, "\"random\"", "\"striped\""), "\"partial_sum\"", "\"sum\""))
                      .find("expected a contribution or \"partial_sum\", got \"sum\""),
                  std::string::npos);
        EXPECT_NE(planStr(plan, 1 << 20).find("partial sum"), std::string::npos);
      }
    }
  }
  EXPECT_GT(num_sums, 50);
}

TEST(PlanJson, RefusesTruncatedTextAnywhere) {
  std::mt19937_64 rng(2);
  const std::string text = planToJson(planResharding({layouts::randomPair(rng), layouts::randomPair(rng)}, Topology::uniform(12, 4), {}));
  const size_t last = text.find_last_of('}');
  for (size_t size = 0; size <= last; size += size < 500 ? 1 : 37) {
    ASSERT_NE(complaint(text.substr(0, size)).find("JSON line "), std::string::npos) << size;
  }
}

TEST(PlanJson, NamesPlaceAndField) {
  const std::string text = planToJson(publishedPlan(2, "send_recv"));
  const auto expect = [&](const std::string& from, const std::string& to, const std::string& message) {
    const std::string found = complaint(replaced(text, from, to));
    EXPECT_NE(found.find(message), std::string::npos) << found;
  };
  expect("\"version\":1", "\"version\":2", "JSON line 2, column 11, field version: expected version 1, got 2");
  expect("\"version\":1", "\"edition\":1", "member 'version' is missing");
  expect("\"send_recv\"", "\"send_receive\"", "field strategy: unknown strategy 'send_receive'");
  expect("\"send_recv\"", "7", "field strategy: expected a string, got an integer");
  expect("[1024,1024,512]", "[1024,1024,\"x\"]", "field tensors[0].shape[2]: expected an integer, got a string");
  expect("Shard(1)", "Shard(9)", "field tensors: tensor 0: source");
  expect("\"float32\"", "\"float31\"", "field tensors[0].dtype: unknown dtype 'float31'");
  expect("[0,0,0,", "[0,0,1,", "field tasks[0]: this is not the task");
  expect("\"messages\":[\n[", "\"messages\":[\n[99", "there is no task 99");
  expect("\"messages\":[\n[0,", "\"messages\":[\n[0,0,0,", "field messages[0]: expected 5 items, got 7");
  expect("\"is_measured\":false", "\"is_measured\":false,\"is_measured\":true", "occurs twice");
  expect("\"is_measured\":false", "\"is_measured\":false,\"mtu\":9000", "unknown member 'mtu'");
  EXPECT_NE(complaint(text + "x").find("expected the end, got 'x'"), std::string::npos);
}

TEST(Json, RefusesWhatIsNoJson) {
  for (const char* bad : {"",          "01",      "1.",          "+1",   "nul",
                          "\"a",       "\"\\q\"", "\"\\u00e9\"", "[1,]", "[1 2]",
                          "{\"a\" 1}", "{1:2}",   "{\"a\":1,}",  "--1",  "9223372036854775808",
                          "1e999",     "\"\t\"",  "[",           "]",    "{\"a\":1,\"a\":2}"}) {
    EXPECT_THROW(parseJson(bad), InvalidArgument) << bad;
  }
  EXPECT_THROW(parseJson(std::string(100, '[')), InvalidArgument);
  EXPECT_EQ(parseJson(" [-0, 1e3, \"\\u0041\\n\", true, null] ").array().size(), 5U);
  EXPECT_EQ(parseJson("[\"\\u0041\\n\"]").array()[0].string(), "A\n");
}

TEST(Fingerprint, TellsPlansApartAndIsTheSameEverywhere) {
  const ReshardingPlan plan = publishedPlan(3, "broadcast");
  EXPECT_EQ(planFingerprint(plan), planFingerprint(publishedPlan(3, "broadcast")));
  ReshardingPlan other = plan;
  std::swap(other.messages[0], other.messages[1]);
  EXPECT_NE(planFingerprint(plan), planFingerprint(other));
  EXPECT_NE(planFingerprint(plan), planFingerprint(publishedPlan(3, "send_recv")));
  const Strategy strategy = parseStrategy("broadcast");
  EXPECT_EQ(inputsFingerprint(plan.tensors, plan.topology, strategy), inputsFingerprint(plan.tensors, plan.topology, strategy));
  EXPECT_NE(inputsFingerprint(plan.tensors, plan.topology, strategy), inputsFingerprint({}, plan.topology, strategy));
}

TEST(TextOfPlan, ShowsWhatAHumanLooksFor) {
  const std::string text = planStr(publishedPlan(0, "broadcast"), 3);
  for (const char* part : {"strategy broadcast", "float32[1024, 1024, 512]", "2.00 GiB", "(Shard(0), Replicate())", "lower bound  1.00 GiB",
                           "NIC out", "of the bound", "more messages"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
  EXPECT_EQ(bytesStr(7), "7 B");
  EXPECT_EQ(bytesStr(1536), "1.50 KiB");
  EXPECT_EQ(secondsStr(0.0032), "3.200 ms");
}

}  // namespace
}  // namespace xmesh::core
