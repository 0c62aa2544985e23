#pragma once

#include <cstddef>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include "core/parallelism/stage_search.h"
#include "core/parallelism/stage_table.h"

namespace xmesh::core {

constexpr double kNoTime = std::numeric_limits<double>::infinity();

/// A problem's moves, as long as none takes longer than a limit.
struct TimedMoves {
  const StageMoves& moves;
  double t_max = kNoTime;

  const MoveChoice* choice(const StageMove& move, size_t num_stages) const {
    const MoveChoice* const out = moves.fastest(move, num_stages);
    return out != nullptr && out->seconds <= t_max ? out : nullptr;
  }
  double seconds(const StageMove& move, size_t num_stages) const {
    const MoveChoice* const found = choice(move, num_stages);
    return found == nullptr ? kNoTime : found->seconds;
  }
};

/// A plan, and what eq. 2 makes its seconds of.
struct TimedPlan {
  std::vector<PlannedStage> stages;
  double sum = 0;
  double slowest = 0;
};

/// Where a table of least sums of seconds, filled with `moves`, has plans of `num_stages` stages that use all devices: the best of them.
TimedPlan leastSumPlan(const StageTable<double>& table, const DeviceCounts& counts, const TimedMoves& moves, size_t num_layers, size_t num_stages);

/// The same plans, all, by their sums: the first that `accepts`. Where there is none whose sum is less than `most_sum`, or none after `most_tries`
/// stages were looked at, nothing; `least_sum` is then what no plan that it left out falls below.
struct AcceptedPlan {
  std::optional<TimedPlan> plan;
  double least_sum = kNoTime;
  size_t num_tries = 0;
};
struct AcceptedPlanLimits {
  double most_sum = kNoTime;
  size_t most_tries = 0;
  std::function<bool(const TimedPlan&)> accepts;
};
AcceptedPlan leastAcceptedPlan(const StageTable<double>& table, const DeviceCounts& counts, const TimedMoves& moves, size_t num_stages,
                               const AcceptedPlanLimits& limits);

}  // namespace xmesh::core
