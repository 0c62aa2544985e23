#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "runtime/plans.h"
#include "runtime/program/program.h"
#include "runtime/random_plan.h"
#include "runtime/reshard_case.h"

namespace xmesh::replay {
namespace {

using core::Placement;
using core::ReduceOp;
using runtime::compileProgram;
using runtime::Program;
using runtime::ProgramOptions;

template <typename Call>
std::string errorOf(const Call& call) {
  try {
    call();
  } catch (const core::InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST(Program, BothEndsOfAPairAgreeOnEveryMessage) {
  for (uint64_t round = 0; round < 400; ++round) {
    std::mt19937_64 rng(mix(round));
    core::TensorPair pair = layouts::randomPair(rng);
    drawDType(rng, pair);
    const core::ReshardingPlan plan = RandomPlanner({pair}, layouts::randomTopology(rng, 12), rng).plan();
    const ProgramOptions options{randomInt(rng, 1, 300)};
    std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> sent;
    std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> received;
    for (int64_t rank : plan.participants()) {
      const auto program = compileProgram(plan, rank, options);
      for (const runtime::SendStep& step : program->sends) {
        const int64_t num_bytes = program->numBytes(step);
        EXPECT_LE(num_bytes, std::max(options.max_message_bytes, pair.src.dtype.accumulatorItemBytes()));
        sent[{rank, program->peers()[static_cast<size_t>(step.peer)]}].push_back(num_bytes);
      }
      for (const runtime::ReceiveStep& step : program->receives) {
        received[{program->peers()[static_cast<size_t>(step.peer)], rank}].push_back(program->numBytes(step));
      }
    }
    ASSERT_EQ(sent, received) << "round " << round;
  }
}

TEST(Program, TellsShapesAndPeers) {
  const core::ReshardingPlan plan = transposePlan(5, 4, 2, 2);
  const auto source = compileProgram(plan, 1);
  EXPECT_EQ(source->peers(), (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(source->numSends(), 2);
  EXPECT_EQ(source->numReceives(), 0);
  EXPECT_EQ(source->srcShape(0), (std::vector<int64_t>{2, 4}));
  EXPECT_FALSE(source->dstShape(0).has_value());
  const auto stranger = compileProgram(plan, 77);
  EXPECT_TRUE(stranger->peers().empty());
  EXPECT_FALSE(stranger->srcShape(0).has_value());
}

TEST(Program, CutsLongMessages) {
  const core::ReshardingPlan plan = chainPlan(100, 100, 2);
  const auto program = compileProgram(plan, 1, {64});
  EXPECT_EQ(program->numReceives(), 7);
  EXPECT_EQ(program->numSends(), 7);
  for (const runtime::SendStep& step : program->sends) {
    EXPECT_EQ(step.num_deps, 1) << "forwarded piece by piece";
  }
}

TEST(Program, CutMessagesOfAllPairsComeAlongTogether) {
  constexpr int64_t kSenders = 4;
  const auto program = compileProgram(transposePlan(32, 32, kSenders, 2), kSenders, {64});
  ASSERT_EQ(program->numReceives(), 32);
  for (int64_t i = 0; i < 32; ++i) {
    EXPECT_EQ(program->peers()[static_cast<size_t>(program->receives[static_cast<size_t>(i)].peer)], i % kSenders);
  }
}

/// Partial over ranks 0, 1, 2, wanted by rank 3.
core::ReshardingPlan partialPlan(std::vector<int64_t> needers) {
  return emptyPlan({{lineSpec({8}, "bfloat16", {0, 1, 2}, Placement::partial(ReduceOp::kSum)),
                     lineSpec({8}, "bfloat16", std::move(needers), Placement::replicate())}});
}

TEST(Program, LaysContributionsOutRangeByRange) {
  core::ReshardingPlan plan = partialPlan({3});
  plan.messages = {contributionMessage(0, 0, 8, 2, 3, 2), contributionMessage(0, 0, 5, 0, 3, 0), contributionMessage(0, 5, 8, 0, 3, 0),
                   contributionMessage(0, 0, 8, 1, 3, 1)};
  const auto program = compileProgram(plan, 3);
  ASSERT_EQ(program->reductions.size(), 2U);
  EXPECT_EQ(program->numReceives(), 6);
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(program->peers()[static_cast<size_t>(program->receives[i].peer)], static_cast<int64_t>(i % 3)) << "contribution order";
    EXPECT_EQ(program->receives[i].begin, i < 3 ? 0 : 5);
  }
}

TEST(Program, RefusesIncompleteReductions) {
  core::ReshardingPlan plan = partialPlan({3});
  plan.messages = {contributionMessage(0, 0, 8, 2, 3, 2), contributionMessage(0, 0, 8, 0, 3, 0)};
  EXPECT_NE(errorOf([&] { compileProgram(plan, 3); }).find("elements [0, 8) get 2 of 3 contributions"), std::string::npos);
  plan.messages.push_back(contributionMessage(0, 0, 8, 1, 3, 1));
  plan.messages.push_back(contributionMessage(0, 3, 4, 1, 3, 1));
  EXPECT_NE(errorOf([&] { compileProgram(plan, 3); }).find("contribution 1 comes twice"), std::string::npos);
  plan.messages.back().contribution = 5;
  EXPECT_NE(errorOf([&] { compileProgram(plan, 3); }).find("there is no contribution 5"), std::string::npos);
}

/// Ranks 2 and 0 to rank 1, from there to rank 3.
core::ReshardingPlan sumPlan(std::vector<int64_t> needers = {3}) {
  core::ReshardingPlan plan = partialPlan(std::move(needers));
  plan.messages = {contributionMessage(0, 0, 8, 2, 1, 2), contributionMessage(0, 0, 8, 0, 1, 0), sumMessage(0, 0, 3, 1, 3),
                   sumMessage(0, 3, 8, 1, 3)};
  return plan;
}

TEST(Program, SendsSumsRangeByRange) {
  const auto middle = compileProgram(sumPlan(), 1, {4 * 4});
  ASSERT_EQ(middle->reductions.size(), 3U) << "[0, 3), [3, 7), [7, 8)";
  ASSERT_EQ(middle->numSends(), 3);
  for (size_t i = 0; i < 3; ++i) {
    const runtime::ReduceStep& step = middle->reductions[i];
    EXPECT_EQ(step.box, -1);
    EXPECT_EQ(step.own_after, 1) << "between contributions 0 and 2";
    EXPECT_EQ(middle->sends[i].reduction, static_cast<int32_t>(i));
    EXPECT_EQ(middle->sends[i].begin, step.begin);
    EXPECT_EQ(middle->sends[i].position, middle->receives[2 * i + 1].position + 1) << "right behind what it is made of";
    EXPECT_EQ(middle->numBytes(middle->sends[i]), (step.end - step.begin) * 4) << "in float32";
    EXPECT_EQ(middle->numBytes(middle->receives[2 * i]), (step.end - step.begin) * 2);
  }
  const auto last = compileProgram(sumPlan(), 3, {4 * 4});
  EXPECT_EQ(last->numReceives(), 3);
  EXPECT_TRUE(last->receives[0].is_sum);
  EXPECT_GE(last->reductions[0].box, 0);
}

TEST(Program, RefusesWrongSums) {
  const auto errorWith = [](int64_t rank, auto change) {
    core::ReshardingPlan plan = sumPlan();
    change(plan.messages);
    return errorOf([&] { compileProgram(plan, rank); });
  };
  EXPECT_NE(errorWith(3, [](auto& m) { m.erase(m.begin()); }).find("elements [0, 3) lack contribution 2"), std::string::npos);
  EXPECT_NE(errorWith(3, [](auto& m) { m.push_back(contributionMessage(0, 0, 3, 0, 3, 0)); }).find("get more than once contribution 0"),
            std::string::npos);
  EXPECT_NE(errorWith(1, [](auto& m) { m.push_back(contributionMessage(0, 0, 8, 1, 3, 1)); }).find("after the rank has given its sum of them away"),
            std::string::npos);
  EXPECT_NE(errorWith(1, [](auto& m) { m.erase(m.begin(), m.begin() + 2); }).find("are to be sent on before the rank received any"),
            std::string::npos);
  EXPECT_NE(errorWith(1, [](auto& m) { m[0].contribution = 1; }).find("which does not hold contribution 1"), std::string::npos);
}

TEST(Program, RefusesToSendWhatIsNotThere) {
  core::ReshardingPlan plan = chainPlan(10, 5, 2);
  std::swap(plan.messages[0], plan.messages[1]);
  EXPECT_NE(errorOf([&] { compileProgram(plan, 1); }).find("from rank 1 to rank 2 with elements [0, 5) of task 0"), std::string::npos);
  plan = chainPlan(10, 5, 2);
  plan.messages.pop_back();
  EXPECT_NE(errorOf([&] { compileProgram(plan, 2); }).find("rank 2 needs 10 elements of task 0 (tensor 0, [0:10]), the plan brings it 5"),
            std::string::npos);
  plan = chainPlan(10, 5, 2);
  plan.messages.push_back(valueMessage(0, 4, 6, 0, 2));
  EXPECT_NE(errorOf([&] { compileProgram(plan, 2); }).find("has some of them already"), std::string::npos);
  plan.messages.back() = valueMessage(0, 4, 60, 0, 2);
  EXPECT_NE(errorOf([&] { compileProgram(plan, 2); }).find("carries elements [4, 60) of 10"), std::string::npos);
  plan.messages.back() = valueMessage(0, 4, 6, 2, 2);
  EXPECT_NE(errorOf([&] { compileProgram(plan, 2); }).find("to itself"), std::string::npos);
}

TEST(Program, RefusesLocalTensorsThatDoNotFit) {
  const auto program = compileProgram(transposePlan(4, 4, 2, 2), 0);
  float data[8] = {};
  EXPECT_NO_THROW(program->checkLocalTensors({{data, {2, 4}, {4, 1}}}, {{}}));
  EXPECT_NE(errorOf([&] {
              program->checkLocalTensors({{data, {4, 2}, {2, 1}}}, {{}});
            }).find("source's local tensor of tensor 0 on rank 0: expected shape [2, 4], got [4, 2]"),
            std::string::npos);
  EXPECT_NE(errorOf([&] { program->checkLocalTensors({{nullptr, {2, 4}, {4, 1}}}, {{}}); }).find("has no memory"), std::string::npos);
  EXPECT_NE(errorOf([&] { program->checkLocalTensors({}, {}); }).find("expected 1 source and 1 destination tensors, got 0 and 0"), std::string::npos);
}

}  // namespace
}  // namespace xmesh::replay
