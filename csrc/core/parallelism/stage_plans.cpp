#include "core/parallelism/stage_plans.h"

#include <algorithm>
#include <queue>
#include <tuple>

namespace xmesh::core {
namespace {

constexpr size_t kNoParent = std::numeric_limits<size_t>::max();

/// The first stages of a plan, by its last one.
struct Begun {
  size_t parent = kNoParent;
  ChosenStage stage;
  double seconds = 0;      ///< of the stage
  double entering = 0;     ///< of what it reads
  size_t stages_left = 0;  ///< after it
  size_t count_left = 0;
};

/// Orders begun plans by their least sum; of equal ones, what is nearer to its end is first.
struct Ranked {
  double least_sum = 0;
  size_t stages_left = 0;
  size_t begun = 0;
  bool operator>(const Ranked& other) const {
    return std::tie(least_sum, stages_left, begun) > std::tie(other.least_sum, other.stages_left, other.begun);
  }
};

TimedPlan planOf(const std::vector<Begun>& all, size_t last, double sum) {
  TimedPlan out{{}, sum, 0};
  for (size_t index = last; all[index].parent != kNoParent; index = all[index].parent) {
    out.stages.push_back(all[index].stage);
    out.slowest = std::max(out.slowest, all[index].seconds);
  }
  std::reverse(out.stages.begin(), out.stages.end());
  return out;
}

/// Added up from the end on, as the table's.
double leastSum(const std::vector<Begun>& all, size_t last, double rest) {
  double out = rest;
  for (size_t index = last; all[index].parent != kNoParent; index = all[index].parent) {
    out = (all[index].entering + all[index].seconds) + out;
  }
  return out;
}

}  // namespace

TimedPlan leastSumPlan(const StageTable<double>& table, const DeviceCounts& counts, const TimedMoves& moves, size_t num_layers, size_t num_stages) {
  TimedPlan out{{}, table.at(num_stages, 0, counts.last()), 0};
  size_t count = counts.last();
  for (size_t layer = 0; layer < num_layers; --num_stages) {
    const double wanted = table.at(num_stages, layer, count);
    const std::vector<StageMove>& from = moves.moves.from(layer);
    const auto found = std::find_if(from.begin(), from.end(), [&](const StageMove& move) {
      return counts.include(count, move.submesh) &&
             moves.seconds(move, num_stages) + table.at(num_stages - 1, move.end_layer, count - counts.offset(move.submesh)) == wanted;
    });
    const MoveChoice& choice = *moves.choice(*found, num_stages);
    out.stages.push_back({layer, found->end_layer, found->submesh, choice.option});
    out.slowest = std::max(out.slowest, choice.seconds);
    layer = found->end_layer;
    count -= counts.offset(found->submesh);
  }
  return out;
}

AcceptedPlan leastAcceptedPlan(const StageTable<double>& table, const DeviceCounts& counts, const TimedMoves& moves, size_t num_stages,
                               const AcceptedPlanLimits& limits) {
  std::vector<Begun> all{{kNoParent, {}, 0, 0, num_stages, counts.last()}};
  std::priority_queue<Ranked, std::vector<Ranked>, std::greater<>> queue;
  queue.push({table.at(num_stages, 0, counts.last()), num_stages, 0});
  while (!queue.empty()) {
    const Ranked next = queue.top();
    queue.pop();
    const Begun begun = all[next.begun];
    if (begun.stages_left == 0) {
      TimedPlan plan = planOf(all, next.begun, next.least_sum);
      if (limits.accepts(plan)) {
        return {std::move(plan), next.least_sum, all.size()};
      }
      continue;
    }
    if (all.size() > limits.most_tries) {
      return {std::nullopt, next.least_sum, all.size()};
    }
    for (const StageMove& move : moves.moves.from(begun.stage.end_layer)) {
      const MoveChoice* const choice = moves.choice(move, begun.stages_left);
      if (choice == nullptr || !counts.include(begun.count_left, move.submesh)) {
        continue;
      }
      const size_t count_left = begun.count_left - counts.offset(move.submesh);
      const double rest = table.at(begun.stages_left - 1, move.end_layer, count_left);
      all.push_back({next.begun,
                     {begun.stage.end_layer, move.end_layer, move.submesh, choice->option},
                     choice->seconds,
                     move.entering,
                     begun.stages_left - 1,
                     count_left});
      if (const double sum = leastSum(all, all.size() - 1, rest); sum < limits.most_sum) {
        queue.push({sum, begun.stages_left - 1, all.size() - 1});
      } else {
        all.pop_back();
      }
    }
  }
  return {std::nullopt, kNoTime, all.size()};
}

}  // namespace xmesh::core
