#include <gtest/gtest.h>

#include <cstddef>
#include <string>

#include "core/error.h"
#include "core/resharding/plan_resharding.h"
#include "core/resharding/validate.h"
#include "element_oracle.h"
#include "random_layouts.h"
#include "runtime/random_plan.h"

namespace xmesh::core {
namespace {

std::string complaint(const ReshardingPlan& plan) {
  try {
    validatePlan(plan);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

/// Two contributions on ranks 0 and 1, needed by 1 and 2.
ReshardingPlan partialPlan() {
  const DType dtype = DType::parse("float32");
  const TensorPair pair{{{8}, dtype, Mesh({2}, {0, 1}), {Placement::partial(ReduceOp::kSum)}},
                        {{8}, dtype, Mesh({2}, {1, 2}), {Placement::replicate()}}};
  ReshardingPlan plan = planResharding({pair}, Topology::uniform(3, 1), parseStrategy("send_recv"));
  plan.messages = {{0, 0, 8, 0, 1, 0, Payload::kContribution}, {0, 0, 8, 1, 2, 0, Payload::kValue}};
  return plan;
}

TEST(Validate, MarksTheBadMessage) {
  ReshardingPlan plan = partialPlan();
  EXPECT_EQ(complaint(plan), "");
  std::swap(plan.messages[0], plan.messages[1]);
  const std::string text = complaint(plan);
  EXPECT_NE(text.find("rank 1 sends elements [0, 8) before it has them"), std::string::npos) << text;
  EXPECT_NE(text.find("> 0  [0, 8)  1 -> 2  value"), std::string::npos) << text;
}

TEST(Validate, NamesWhatIsWrong) {
  const auto with = [](auto change) {
    ReshardingPlan plan = partialPlan();
    change(plan.messages);
    return complaint(plan);
  };
  EXPECT_NE(with([](auto& m) { m.pop_back(); }).find("rank 2 ends without elements [0, 8)"), std::string::npos);
  EXPECT_NE(with([](auto& m) { m.push_back(m[0]); }).find("rank 1 has elements [0, 8) already"), std::string::npos);
  EXPECT_NE(with([](auto& m) { m[0].contribution = 1; }).find("does not hold contribution 1"), std::string::npos);
  EXPECT_NE(with([](auto& m) { m[0].contribution = 2; }).find("there is no contribution 2"), std::string::npos);
  EXPECT_NE(with([](auto& m) { m[1].end = 9; }).find("are not a part of the task's 8"), std::string::npos);
  EXPECT_NE(with([](auto& m) { m[1].task = 1; }).find("there is no task 1"), std::string::npos);
  EXPECT_NE(with([](auto& m) { m[1].dst_rank = 0; }).find("receives what it does not need"), std::string::npos);
  EXPECT_NE(with([](auto& m) { m[1].dst_rank = 1; }).find("sends to itself"), std::string::npos);
  EXPECT_NE(with([](auto& m) { m[1].dst_rank = 7; }).find("rank 7 is in no mesh"), std::string::npos);
  EXPECT_NE(with([](auto& m) { m[0].end = 7; }).find("[7, 8) before it has them"), std::string::npos);
}

/// Three contributions on ranks 0, 1 and 2, summed up on the way to rank 3, which passes the value on to rank 1.
ReshardingPlan chainOfSums() {
  const DType dtype = DType::parse("float32");
  const TensorPair pair{{{8}, dtype, Mesh({3}, {0, 1, 2}), {Placement::partial(ReduceOp::kSum)}},
                        {{8}, dtype, Mesh({2}, {1, 3}), {Placement::replicate()}}};
  ReshardingPlan plan = planResharding({pair}, Topology::uniform(4, 1), parseStrategy("send_recv"));
  plan.messages = {{0, 0, 8, 0, 1, 0, Payload::kContribution},
                   {0, 0, 5, 1, 2, 0, Payload::kPartialSum},
                   {0, 5, 8, 1, 2, 0, Payload::kPartialSum},
                   {0, 0, 8, 2, 3, 0, Payload::kPartialSum},
                   {0, 0, 8, 3, 1, 0, Payload::kValue}};
  return plan;
}

TEST(Validate, FollowsPartialSums) {
  EXPECT_EQ(complaint(chainOfSums()), "");
  const auto with = [](auto change) {
    ReshardingPlan plan = chainOfSums();
    change(plan.messages);
    return complaint(plan);
  };
  const Message again{0, 2, 4, 1, 3, 1, Payload::kContribution};
  EXPECT_NE(with([&](auto& m) { m.insert(m.begin() + 3, again); }).find("rank 1 has given its sum of elements [2, 4) away"), std::string::npos);
  EXPECT_NE(with([](auto& m) { m.insert(m.begin() + 3, m[2]); }).find("rank 1 has given its sum of elements [5, 8) away"), std::string::npos);
  EXPECT_NE(with([](auto& m) { m.push_back({0, 0, 1, 0, 2, 0, Payload::kContribution}); }).find("rank 2 has given its sum of elements [0, 1) away"),
            std::string::npos);
  EXPECT_NE(with([](auto& m) { m.insert(m.begin() + 2, {0, 0, 8, 0, 2, 0, Payload::kContribution}); }).find("rank 2 has elements [0, 8) already"),
            std::string::npos);
  EXPECT_NE(with([](auto& m) {
              m.insert(m.begin(), {0, 0, 8, 0, 2, 0, Payload::kContribution});
            }).find("rank 2 has contribution 0 to elements [0, 5) already"),
            std::string::npos);
  EXPECT_NE(with([](auto& m) { m.erase(m.begin() + 2); }).find("[5, 8) before it received any"), std::string::npos);
  EXPECT_NE(with([](auto& m) { m.erase(m.begin()); }).find("rank 1 sends a sum of elements [0, 5) before it received any"), std::string::npos);
  EXPECT_NE(with([](auto& m) { m.pop_back(); }).find("rank 1 ends without elements [0, 8)"), std::string::npos);
  EXPECT_NE(with([](auto& m) { m[3].payload = Payload::kValue; }).find("rank 2 reduces what it does not need"), std::string::npos);
  EXPECT_NE(with([](auto& m) {
              m.insert(m.begin(), {0, 0, 8, 1, 0, 1, Payload::kContribution});
            }).find("rank 0 keeps contributions to elements [0, 8) that it does not need"),
            std::string::npos);
  EXPECT_NE(with([](auto& m) { m.push_back({0, 0, 8, 3, 1, 0, Payload::kPartialSum}); }).find("rank 1 has elements [0, 8) already"),
            std::string::npos);
}

/// On broken plans validatePlan and the element-wise oracle agree, both ways.
TEST(Validate, AgreesWithTheOracleOnMutatedPlans) {
  int num_refused = 0;
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    std::mt19937_64 rng(seed);
    layouts::LayoutOptions options;
    options.max_elements = 64;
    const TensorPair pair = layouts::randomPair(rng, options);
    const Topology topology = layouts::randomTopology(rng, options.num_ranks);
    ReshardingPlan plan = seed % 3 == 0 ? replay::RandomPlanner({pair}, topology, rng).plan()
                                        : planResharding({pair}, topology, parseStrategy(seed % 3 == 1 ? "send_recv" : "broadcast:num_chunks=3"));
    if (plan.messages.empty()) {
      continue;
    }
    const auto index = static_cast<size_t>(layouts::randomInt(rng, 0, static_cast<int64_t>(plan.messages.size()) - 1));
    Message& message = plan.messages[index];
    switch (layouts::randomInt(rng, 0, 4)) {
      case 0:
        plan.messages.erase(plan.messages.begin() + static_cast<std::ptrdiff_t>(index));
        break;
      case 1:
        plan.messages.push_back(message);
        break;
      case 2:
        std::swap(message, plan.messages[static_cast<size_t>(layouts::randomInt(rng, 0, static_cast<int64_t>(plan.messages.size()) - 1))]);
        break;
      case 3:
        message.payload = static_cast<Payload>((static_cast<int>(message.payload) + layouts::randomInt(rng, 1, 2)) % 3);
        break;
      default:
        message.begin = message.begin + 1 < message.end ? message.begin + 1 : message.begin;
    }
    const std::string expected = layouts::ElementOracle::check(plan);
    ASSERT_EQ(complaint(plan).empty(), expected.empty()) << "seed " << seed << ": " << expected << "\n" << complaint(plan);
    num_refused += expected.empty() ? 0 : 1;
  }
  EXPECT_GT(num_refused, 500);
}

}  // namespace
}  // namespace xmesh::core
