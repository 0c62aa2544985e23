// Random problems of stage search, and all plans of them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "core/parallelism/stage_search.h"
#include "core/parallelism/submeshes.h"

namespace xmesh::core {

constexpr double kNone = std::numeric_limits<double>::infinity();
constexpr int64_t kManyBytes = 1000000;

inline const std::vector<std::vector<HostClass>>& clusters() {
  static const std::vector<std::vector<HostClass>> out{{{1, 4}}, {{2, 2}}, {{2, 4}}, {{3, 3}}, {{1, 2}, {1, 4}}, {{2, 2}, {2, 1}}};
  return out;
}

enum class InFlight { kOneForwardOneBackward, kEager, kGPipe };

inline std::vector<int64_t> inFlight(InFlight rule, size_t num_microbatches, size_t most_stages) {
  std::vector<int64_t> out;
  for (size_t stages = 1; stages <= most_stages; ++stages) {
    const size_t held = rule == InFlight::kOneForwardOneBackward ? stages : rule == InFlight::kEager ? 2 * stages - 1 : num_microbatches;
    out.push_back(static_cast<int64_t>(std::min(num_microbatches, held)));
  }
  return out;
}

/// Seconds are small whole numbers, of which many are equal, or fractions whose sums round. Some submeshes cannot run some layers.
inline StageProblem randomProblem(std::mt19937_64& random, bool has_memory) {
  StageProblem out;
  const std::vector<HostClass>& cluster = clusters()[random() % clusters().size()];
  out.num_layers = 1 + random() % 5;
  out.num_microbatches = 1 + random() % 8;
  for (const HostClass& hosts : cluster) {
    out.num_devices.push_back(hosts.num_hosts * hosts.devices_per_host);
  }
  for (const Submesh& submesh : submeshShapes(cluster, {HostCounts::kAll, true})) {
    out.submeshes.push_back({submesh.numDevices(cluster.size()), has_memory ? static_cast<int64_t>(random() % 60) : kManyBytes});
  }
  out.in_flight = inFlight(static_cast<InFlight>(random() % 3), out.num_microbatches, random() % 4 == 0 ? 2 : out.num_layers);
  const bool is_whole = random() % 2 == 0;
  for (size_t first = 0; first < out.num_layers; ++first) {
    for (size_t last = first; last < out.num_layers; ++last) {
      for (size_t submesh = 0; submesh < out.submeshes.size(); ++submesh) {
        for (size_t option = 0; option < random() % 4; ++option) {
          const double seconds = is_whole ? static_cast<double>(random() % 6) : static_cast<double>(random() % 1000) / 7;
          out.addOption(first, last, submesh, {seconds, static_cast<int64_t>(random() % 20), static_cast<int64_t>(random() % 10)});
        }
      }
    }
  }
  out.options.resize(out.num_layers * out.num_layers * out.submeshes.size());
  if (random() % 2 == 0) {
    for (size_t place = 0; place < out.num_layers * out.submeshes.size(); ++place) {
      out.entering.push_back(is_whole ? static_cast<double>(random() % 4) : static_cast<double>(random() % 100) / 7);
    }
  }
  return out;
}

inline const StageOption& optionOf(const StageProblem& problem, const ChosenStage& stage) {
  return problem.optionsOf(stage.first_layer, stage.end_layer - 1, stage.submesh).at(stage.option);
}

inline double slowestOf(const StageProblem& problem, const std::vector<ChosenStage>& stages) {
  double out = 0;
  for (const ChosenStage& stage : stages) {
    out = std::max(out, optionOf(problem, stage).seconds);
  }
  return out;
}

inline double secondsOf(const StageProblem& problem, const std::vector<ChosenStage>& stages) {
  double sum = 0;
  for (size_t stage = stages.size(); stage-- > 0;) {
    sum = (problem.enteringOf(stages[stage].first_layer, stages[stage].submesh) + optionOf(problem, stages[stage]).seconds) + sum;
  }
  return sum + static_cast<double>(problem.num_microbatches - 1) * slowestOf(problem, stages);
}

inline int64_t bytesOf(const StageProblem& problem, const std::vector<ChosenStage>& stages, size_t stage) {
  const StageOption& option = optionOf(problem, stages[stage]);
  return option.stage_bytes + problem.in_flight.at(stages.size() - stage - 1) * option.bytes_per_microbatch;
}

inline bool fits(const StageProblem& problem, const std::vector<ChosenStage>& stages) {
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    if (bytesOf(problem, stages, stage) > problem.submeshes[stages[stage].submesh].memory_bytes) {
      return false;
    }
  }
  return true;
}

/// Every plan that uses all devices, whether it fits memory or not.
template <typename Visit>
void forEachPlan(const StageProblem& problem, std::vector<size_t>& devices_left, std::vector<ChosenStage>& stages, const Visit& visit) {
  const size_t layer = stages.empty() ? 0 : stages.back().end_layer;
  if (layer == problem.num_layers) {
    if (std::all_of(devices_left.begin(), devices_left.end(), [](size_t left) { return left == 0; })) {
      visit(stages);
    }
    return;
  }
  if (stages.size() == problem.in_flight.size()) {
    return;
  }
  for (size_t submesh = 0; submesh < problem.submeshes.size(); ++submesh) {
    const std::vector<size_t>& used = problem.submeshes[submesh].num_devices;
    if (!std::equal(used.begin(), used.end(), devices_left.begin(), std::less_equal<>())) {
      continue;
    }
    std::transform(devices_left.begin(), devices_left.end(), used.begin(), devices_left.begin(), std::minus<>());
    for (size_t end = layer + 1; end <= problem.num_layers; ++end) {
      for (size_t option = 0; option < problem.optionsOf(layer, end - 1, submesh).size(); ++option) {
        stages.push_back({layer, end, submesh, option});
        forEachPlan(problem, devices_left, stages, visit);
        stages.pop_back();
      }
    }
    std::transform(devices_left.begin(), devices_left.end(), used.begin(), devices_left.begin(), std::plus<>());
  }
}

template <typename Visit>
void forEachPlan(const StageProblem& problem, const Visit& visit) {
  std::vector<size_t> devices_left = problem.num_devices;
  std::vector<ChosenStage> stages;
  forEachPlan(problem, devices_left, stages, visit);
}

inline void expectValid(const StageProblem& problem, const StagePlan& plan) {
  std::vector<size_t> used(problem.num_devices.size(), 0);
  size_t layer = 0;
  for (const ChosenStage& stage : plan.stages) {
    EXPECT_EQ(stage.first_layer, layer);
    EXPECT_LT(stage.first_layer, stage.end_layer);
    layer = stage.end_layer;
    const std::vector<size_t>& devices = problem.submeshes.at(stage.submesh).num_devices;
    std::transform(used.begin(), used.end(), devices.begin(), used.begin(), std::plus<>());
  }
  EXPECT_EQ(layer, problem.num_layers);
  EXPECT_EQ(used, problem.num_devices);
  EXPECT_TRUE(fits(problem, plan.stages));
  EXPECT_EQ(plan.seconds, secondsOf(problem, plan.stages));
  EXPECT_EQ(plan.slowest, slowestOf(problem, plan.stages));
}

}  // namespace xmesh::core
