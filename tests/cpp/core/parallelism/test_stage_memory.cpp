// The memory that stages need, against all plans tried.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <vector>

#include "core/parallelism/stage_problems.h"
#include "core/parallelism/stage_search.h"

namespace xmesh::core {
namespace {

TEST(StageMemory, IsTheLeastOfAllPlans) {
  size_t num_found = 0;
  for (uint64_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    StageProblem problem = randomProblem(random, true);
    std::optional<int64_t> expected;
    forEachPlan(problem, [&](const std::vector<ChosenStage>& stages) {
      int64_t most = 0;
      for (size_t stage = 0; stage < stages.size(); ++stage) {
        most = std::max(most, bytesOf(problem, stages, stage));
      }
      expected = std::min(expected.value_or(most), most);
    });
    const std::optional<MemoryNeed> found = smallestMemory(problem);
    ASSERT_EQ(found.has_value(), expected.has_value());
    if (!found) {
      continue;
    }
    ++num_found;
    EXPECT_EQ(found->num_bytes, *expected);
    EXPECT_EQ(bytesOf(problem, found->stages, found->largest_stage), *expected);
    for (StageSubmesh& submesh : problem.submeshes) {
      submesh.memory_bytes = *expected;
    }
    expectValid(problem, {found->stages, secondsOf(problem, found->stages), slowestOf(problem, found->stages), true});
    EXPECT_FALSE(bestStagePlans(problem).empty());
    for (StageSubmesh& submesh : problem.submeshes) {
      submesh.memory_bytes = *expected - 1;
    }
    EXPECT_TRUE(bestStagePlans(problem).empty());
  }
  EXPECT_GT(num_found, 200U);
}

}  // namespace
}  // namespace xmesh::core
