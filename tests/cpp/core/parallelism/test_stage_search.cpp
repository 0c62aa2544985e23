// Stages of least time, against all plans tried, and against Algorithm 1 as it is written.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/parallelism/stage_problems.h"
#include "core/parallelism/stage_search.h"
#include "core/parallelism/submeshes.h"

namespace xmesh::core {
namespace {

template <typename Accepts>
double leastSeconds(const StageProblem& problem, const Accepts& accepts) {
  double out = kNone;
  forEachPlan(problem, [&](const std::vector<ChosenStage>& stages) {
    if (fits(problem, stages) && accepts(stages)) {
      out = std::min(out, secondsOf(problem, stages));
    }
  });
  return out;
}

/// To the last bit: sums are added up in one order.
TEST(StageSearch, IsTheBestOfAllPlans) {
  size_t num_found = 0;
  for (uint64_t seed = 0; seed < 900; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const StageProblem problem = randomProblem(random, seed % 3 != 0);
    const double expected = leastSeconds(problem, [](const std::vector<ChosenStage>&) { return true; });
    StageSearchLimits limits;
    limits.count = 1 + seed % 4;
    const std::vector<StagePlan> plans = bestStagePlans(problem, limits);
    ASSERT_EQ(plans.empty(), expected == kNone);
    ASSERT_LE(plans.size(), limits.count);
    for (size_t plan = 0; plan < plans.size(); ++plan) {
      expectValid(problem, plans[plan]);
      EXPECT_EQ(plans[plan].is_proven, plan == 0);
      if (plan > 0) {
        EXPECT_LE(plans[plan - 1].seconds, plans[plan].seconds);
        EXPECT_NE(plans[plan - 1].stages, plans[plan].stages);
      }
    }
    if (!plans.empty()) {
      EXPECT_EQ(plans.front().seconds, expected);
      ++num_found;
    }
  }
  EXPECT_GT(num_found, 300U);
}

TEST(StageSearch, IsTheBestOfPlansOfSoManyStages) {
  size_t num_found = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const StageProblem problem = randomProblem(random, seed % 3 != 0);
    StageSearchLimits limits;
    limits.least_stages = 1 + seed % 4;
    const double expected = leastSeconds(problem, [&](const std::vector<ChosenStage>& stages) { return stages.size() >= limits.least_stages; });
    const std::vector<StagePlan> plans = bestStagePlans(problem, limits);
    ASSERT_EQ(plans.empty(), expected == kNone);
    if (!plans.empty()) {
      EXPECT_TRUE(plans.front().is_proven);
      EXPECT_EQ(plans.front().seconds, expected);
      ++num_found;
    }
  }
  EXPECT_GT(num_found, 60U);
}

/// Algorithm 1 without what spares work, for one class of devices: every t_max, from the smallest on.
double leastSecondsOfAllLimits(const StageProblem& problem) {
  std::set<double> limits;
  for (const std::vector<StageOption>& options : problem.options) {
    for (const StageOption& option : options) {
      limits.insert(option.seconds);
    }
  }
  const size_t num_layers = problem.num_layers;
  const size_t num_devices = problem.num_devices[0];
  double out = kNone;
  for (const double t_max : limits) {
    std::vector<std::vector<double>> rest(num_layers + 1, std::vector<double>(num_devices + 1, kNone));
    rest[num_layers][0] = 0;
    for (size_t stages = 1; stages <= std::min(num_layers, problem.in_flight.size()); ++stages) {
      std::vector<std::vector<double>> sums(num_layers + 1, std::vector<double>(num_devices + 1, kNone));
      for (size_t first = 0; first < num_layers; ++first) {
        for (size_t last = first; last < num_layers; ++last) {
          for (size_t submesh = 0; submesh < problem.submeshes.size(); ++submesh) {
            for (const StageOption& option : problem.optionsOf(first, last, submesh)) {
              const int64_t num_bytes = option.stage_bytes + problem.in_flight[stages - 1] * option.bytes_per_microbatch;
              for (size_t used = problem.submeshes[submesh].num_devices[0]; used <= num_devices; ++used) {
                if (option.seconds <= t_max && num_bytes <= problem.submeshes[submesh].memory_bytes) {
                  const double seconds = problem.enteringOf(first, submesh) + option.seconds;
                  sums[first][used] = std::min(sums[first][used], seconds + rest[last + 1][used - problem.submeshes[submesh].num_devices[0]]);
                }
              }
            }
          }
        }
      }
      rest = std::move(sums);
      out = std::min(out, rest[0][num_devices] + static_cast<double>(problem.num_microbatches - 1) * t_max);
    }
  }
  return out;
}

/// Larger than what all plans can be tried of: 4 hosts of 4 devices.
TEST(StageSearch, SparesNoLimitThatMatters) {
  size_t num_found = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    StageProblem problem;
    problem.num_layers = 5 + random() % 4;
    problem.num_microbatches = 1 + random() % 64;
    problem.num_devices = {16};
    for (const Submesh& submesh : submeshShapes({{4, 4}})) {
      problem.submeshes.push_back({submesh.numDevices(1), 100 + static_cast<int64_t>(random() % 100)});
    }
    problem.in_flight = inFlight(static_cast<InFlight>(random() % 3), problem.num_microbatches, problem.num_layers);
    for (size_t first = 0; first < problem.num_layers; ++first) {
      for (size_t last = first; last < problem.num_layers; ++last) {
        for (size_t submesh = 0; submesh < problem.submeshes.size(); ++submesh) {
          const double devices = std::sqrt(static_cast<double>(problem.submeshes[submesh].num_devices[0]));
          const double work = static_cast<double>((last - first + 1) * (100 + random() % 100));
          problem.addOption(first, last, submesh, {work / devices, static_cast<int64_t>(20 * (last - first)), static_cast<int64_t>(random() % 60)});
          problem.addOption(first, last, submesh, {1.2 * work / devices, static_cast<int64_t>(20 * (last - first)), 5});
        }
      }
    }
    const std::vector<StagePlan> plans = bestStagePlans(problem);
    const double expected = leastSecondsOfAllLimits(problem);
    ASSERT_EQ(plans.empty(), expected == kNone);
    if (!plans.empty()) {
      expectValid(problem, plans[0]);
      EXPECT_EQ(plans[0].seconds, expected);
      EXPECT_TRUE(plans[0].is_proven);
      num_found += plans[0].stages.size() > 1 ? 1 : 0;
    }
  }
  EXPECT_GT(num_found, 30U);
}

TEST(StageSearch, IsTheBestOfThePlansAccepted) {
  size_t num_found = 0;
  size_t num_refused = 0;
  for (uint64_t seed = 0; seed < 900; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const StageProblem problem = randomProblem(random, seed % 2 == 0);
    const auto accepts = [&](const std::vector<ChosenStage>& stages) {
      size_t sum = seed;
      for (const ChosenStage& stage : stages) {
        sum += stage.submesh * stage.submesh + stage.end_layer * stage.end_layer;
      }
      return sum % 4 == 0;
    };
    StageSearchLimits limits;
    limits.accepts = [&](const StagePlan& plan) {
      num_refused += accepts(plan.stages) ? 0 : 1;
      return accepts(plan.stages);
    };
    limits.count = 1 + seed % 3;
    const std::vector<StagePlan> plans = bestStagePlans(problem, limits);
    const double expected = leastSeconds(problem, accepts);
    ASSERT_EQ(plans.empty(), expected == kNone);
    for (const StagePlan& plan : plans) {
      expectValid(problem, plan);
      EXPECT_TRUE(accepts(plan.stages));
    }
    if (!plans.empty()) {
      EXPECT_EQ(plans.front().seconds, expected);
      EXPECT_TRUE(plans.front().is_proven);
      ++num_found;
    }
  }
  EXPECT_GT(num_found, 200U);
  EXPECT_GT(num_refused, 500U);
}

/// Layers of equal work on 2 x 4 devices, some of which a submesh of many devices runs less well.
StageProblem equalLayers(size_t num_layers) {
  StageProblem out;
  out.num_layers = num_layers;
  out.num_microbatches = 16;
  out.num_devices = {8};
  for (const size_t devices : {1, 2, 4, 8}) {
    out.submeshes.push_back({{devices}, kManyBytes});
  }
  out.in_flight = inFlight(InFlight::kOneForwardOneBackward, 16, num_layers);
  for (size_t first = 0; first < num_layers; ++first) {
    for (size_t last = first; last < num_layers; ++last) {
      for (size_t submesh = 0; submesh < out.submeshes.size(); ++submesh) {
        const auto devices = static_cast<double>(out.submeshes[submesh].num_devices[0]);
        out.addOption(first, last, submesh, {static_cast<double>(last - first + 1) / std::pow(devices, 0.9), 0, 0});
      }
    }
  }
  return out;
}

/// Candidates for whoever judges plans by more than eq. 2: every number of stages is among them.
TEST(StageSearch, OffersOtherNumbersOfStages) {
  StageSearchLimits limits;
  limits.count = 50;
  const StageProblem problem = equalLayers(8);
  const std::vector<StagePlan> plans = bestStagePlans(problem, limits);
  std::set<size_t> numbers;
  for (const StagePlan& plan : plans) {
    expectValid(problem, plan);
    numbers.insert(plan.stages.size());
  }
  EXPECT_EQ(plans.front().seconds, bestStagePlans(problem).front().seconds);
  EXPECT_EQ(numbers, (std::set<size_t>{1, 2, 3, 4, 5, 6, 7, 8}));
}

TEST(StageSearch, TooFewTriesAreNoProof) {
  StageSearchLimits limits;
  limits.accepts = [](const StagePlan& plan) { return plan.stages.size() == 1; };
  limits.most_tries = 1;
  const std::vector<StagePlan> plans = bestStagePlans(equalLayers(8), limits);
  ASSERT_EQ(plans.size(), 1U);
  EXPECT_EQ(plans[0].stages.size(), 1U);
  EXPECT_FALSE(plans[0].is_proven);
}

TEST(StageSearch, StopsWhenToldTo) {
  const StageProblem problem = equalLayers(12);
  size_t num_calls = 0;
  StageSearchLimits limits;
  limits.go_on = [&] { return ++num_calls > 0; };
  const std::vector<StagePlan> all = bestStagePlans(problem, limits);
  ASSERT_EQ(all.size(), 1U);
  EXPECT_TRUE(all[0].is_proven);
  size_t num_found = 0;
  for (size_t most_calls = 0; most_calls < num_calls; ++most_calls) {
    size_t calls = 0;
    limits.go_on = [&] { return calls++ < most_calls; };
    const std::vector<StagePlan> plans = bestStagePlans(problem, limits);
    EXPECT_EQ(calls, most_calls + 1);
    for (const StagePlan& plan : plans) {
      expectValid(problem, plan);
      EXPECT_FALSE(plan.is_proven);
      ++num_found;
    }
    EXPECT_FALSE(most_calls == 0 && !plans.empty());
  }
  EXPECT_GT(num_found, 0U);
}

TEST(StageSearch, EpsilonBoundsTheLoss) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const StageProblem problem = randomProblem(random, seed % 2 == 0);
    StageSearchLimits limits;
    limits.epsilon = 0.1 * static_cast<double>(1 + random() % 200);
    const std::vector<StagePlan> exact = bestStagePlans(problem);
    const std::vector<StagePlan> found = bestStagePlans(problem, limits);
    ASSERT_EQ(found.size(), exact.size());
    if (!found.empty()) {
      EXPECT_LE(found[0].seconds, exact[0].seconds + static_cast<double>(problem.num_microbatches) * limits.epsilon);
    }
  }
}

TEST(StageSearch, RefusesWhatIsNoProblem) {
  const StageProblem problem = equalLayers(2);
  const auto expectRefused = [&](auto change) {
    StageProblem changed = problem;
    change(changed);
    EXPECT_THROW(bestStagePlans(changed), InvalidArgument);
    EXPECT_THROW(smallestMemory(changed), InvalidArgument);
  };
  expectRefused([](StageProblem& changed) { changed.num_layers = 0; });
  expectRefused([](StageProblem& changed) { changed.num_layers = 3; });
  expectRefused([](StageProblem& changed) { changed.num_microbatches = 0; });
  expectRefused([](StageProblem& changed) { changed.num_devices = {}; });
  expectRefused([](StageProblem& changed) { changed.num_devices = {0}; });
  expectRefused([](StageProblem& changed) { changed.num_devices = {8, 8}; });
  expectRefused([](StageProblem& changed) { changed.num_devices = {size_t{1} << 40}; });
  expectRefused([](StageProblem& changed) { changed.submeshes[1].num_devices = {0}; });
  expectRefused([](StageProblem& changed) { changed.in_flight = {}; });
  expectRefused([](StageProblem& changed) { changed.in_flight = {2, 1}; });
  expectRefused([](StageProblem& changed) { changed.in_flight = {-1, 1}; });
  expectRefused([](StageProblem& changed) { changed.addOption(0, 1, 0, {-1, 0, 0}); });
  expectRefused([](StageProblem& changed) { changed.addOption(0, 1, 0, {std::nan(""), 0, 0}); });
  expectRefused([](StageProblem& changed) { changed.addOption(0, 1, 0, {1, -1, 0}); });
  expectRefused([](StageProblem& changed) { changed.addOption(0, 1, 0, {1, 0, std::numeric_limits<int64_t>::max() / 2}); });
  StageProblem changed = problem;
  EXPECT_THROW(changed.addOption(1, 0, 0, {1, 0, 0}), InvalidArgument);
  EXPECT_THROW(changed.addOption(0, 2, 0, {1, 0, 0}), InvalidArgument);
  EXPECT_THROW(changed.addOption(0, 1, 4, {1, 0, 0}), InvalidArgument);
  StageSearchLimits limits;
  limits.count = 0;
  EXPECT_THROW(bestStagePlans(problem, limits), InvalidArgument);
  limits.count = 1;
  limits.epsilon = -1;
  EXPECT_THROW(bestStagePlans(problem, limits), InvalidArgument);
}

}  // namespace
}  // namespace xmesh::core
