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
  /// What the move adds to the sum.
  double seconds(const StageMove& move, size_t num_stages) const {
    const MoveChoice* const found = choice(move, num_stages);
    return found == nullptr ? kNoTime : move.entering + found->seconds;
  }
};

/// A plan, and what eq. 2 makes its seconds of.
struct TimedPlan {
  std::vector<ChosenStage> stages;
  double sum = 0;
  double slowest = 0;
};

/// The plan of least sum among those of `num_stages` stages that use all devices. `table` was filled with `moves`, adds up seconds, and has such
/// plans.
TimedPlan leastSumPlan(const StageTable<double>& table, const DeviceCounts& counts, const TimedMoves& moves, size_t num_layers, size_t num_stages);

struct AcceptedPlanLimits {
  double most_sum = kNoTime;  ///< plans with this sum, or a larger one, are not looked at
  size_t most_tries = 0;      ///< how many stages are begun; a search that has begun more finds nothing
  std::function<bool(const TimedPlan&)> accepts;
};

struct AcceptedPlan {
  std::optional<TimedPlan> plan;
  double least_sum = kNoTime;  ///< no accepted plan has a lower sum, of those that limits.most_sum allows
  size_t num_tries = 0;
};

/// The first of the same plans, by their sums, that is accepted: best first, with the table as an exact estimate of what is to come.
AcceptedPlan leastAcceptedPlan(const StageTable<double>& table, const DeviceCounts& counts, const TimedMoves& moves, size_t num_stages,
                               const AcceptedPlanLimits& limits);

}  // namespace xmesh::core
