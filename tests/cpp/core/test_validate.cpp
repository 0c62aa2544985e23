#include <gtest/gtest.h>

#include <cstddef>
#include <string>

#include "core/error.h"
#include "core/resharding/planner.h"
#include "core/resharding/validate.h"
#include "element_oracle.h"
#include "random_layouts.h"

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

/// On broken plans validatePlan and the element-wise oracle agree, both ways.
TEST(Validate, AgreesWithTheOracleOnMutatedPlans) {
  int num_refused = 0;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    std::mt19937_64 rng(seed);
    layouts::LayoutOptions options;
    options.max_elements = 64;
    ReshardingPlan plan = planResharding({layouts::randomPair(rng, options)}, layouts::randomTopology(rng, options.num_ranks),
                                         parseStrategy(seed % 2 == 0 ? "send_recv" : "broadcast:num_chunks=3"));
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
        message.payload = message.payload == Payload::kValue ? Payload::kContribution : Payload::kValue;
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
