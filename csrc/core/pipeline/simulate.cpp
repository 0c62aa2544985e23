#include "core/pipeline/simulate.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/pipeline/play.h"
#include "core/pipeline/validate.h"

namespace xmesh::core {
namespace {

bool isSeconds(double value) { return std::isfinite(value) && value >= 0; }

bool isForwardOnly(const Schedule& schedule) {
  return std::all_of(schedule.cells.begin(), schedule.cells.end(), [](const auto& cells) {
    return std::all_of(cells.begin(), cells.end(), [](const auto& cell) { return !cell || cell->kind == ActionKind::kForward; });
  });
}

}  // namespace

void checkCosts(int32_t num_stages, const ScheduleCosts& costs) {
  require(costs.stages.size() == static_cast<size_t>(num_stages),
          "costs are given for every stage, expected " + std::to_string(num_stages) + " stages, got " + std::to_string(costs.stages.size()));
  require(costs.runs_weights_early.empty() || costs.runs_weights_early.size() == costs.stages.size(),
          "which stages run W early is said for every stage or for none, got " + std::to_string(costs.runs_weights_early.size()) + " of " +
              std::to_string(costs.stages.size()));
  require(costs.weights_group.empty() || costs.weights_group.size() == costs.stages.size(),
          "which stages add to the same gradients is said for every stage or for none, got " + std::to_string(costs.weights_group.size()) + " of " +
              std::to_string(costs.stages.size()));
  require(costs.is_on_one_host.empty() || costs.is_on_one_host.size() == costs.stages.size(),
          "which stages are on one host is said for every stage or for none, got " + std::to_string(costs.is_on_one_host.size()) + " of " +
              std::to_string(costs.stages.size()));
  require(costs.noise >= 0 && costs.noise < 1, "noise is a part of the time, at least 0 and below 1, got " + std::to_string(costs.noise));
  for (size_t stage = 0; stage < costs.stages.size(); ++stage) {
    const StageCost& cost = costs.stages[stage];
    for (double seconds : {cost.forward_s, cost.backward_s, cost.backward_input_s, cost.backward_weight_s, cost.sums_s}) {
      require(isSeconds(seconds), "seconds of stage " + std::to_string(stage) + " must be finite and not negative, got " + std::to_string(seconds));
    }
    for (int64_t bytes : {cost.activation_bytes, cost.weight_bytes, cost.fixed_bytes}) {
      require(bytes >= 0, "bytes of stage " + std::to_string(stage) + " must not be negative, got " + std::to_string(bytes));
    }
  }
  require(isSeconds(costs.latency_s), "latency must be finite and not negative, got " + std::to_string(costs.latency_s) + " s");
  for (const EdgeCost& cost : costs.edges) {
    const std::string name = "edge " + std::to_string(cost.edge.from) + " -> " + std::to_string(cost.edge.to);
    for (const TransferCost& transfer : {cost.forward, cost.backward}) {
      require(isSeconds(transfer.seconds) && transfer.num_bytes >= 0, "seconds and bytes of " + name + " must be finite and not negative, got " +
                                                                          std::to_string(transfer.seconds) + " s and " +
                                                                          std::to_string(transfer.num_bytes) + " bytes");
      require(transfer.num_bytes == 0 || (std::isfinite(costs.nic_bytes_per_s) && costs.nic_bytes_per_s > 0),
              name + " has bytes, so nic_bytes_per_s must be positive, got " + std::to_string(costs.nic_bytes_per_s));
    }
  }
}

std::vector<StageEdge> edgesOf(const ScheduleCosts& costs) {
  std::vector<StageEdge> edges;
  for (const EdgeCost& cost : costs.edges) {
    edges.push_back(cost.edge);
  }
  return edges;
}

double SimulatedSchedule::bubbleFraction() const {
  double busy = 0;
  for (double seconds : busy_s) {
    busy += seconds;
  }
  return makespan_s > 0 ? 1 - busy / (static_cast<double>(busy_s.size()) * makespan_s) : 0;
}

SimulatedSchedule simulateSchedule(const Schedule& schedule, const ScheduleCosts& costs) {
  checkCosts(schedule.num_stages, costs);
  const std::vector<StageEdge> edges = edgesOf(costs);
  validateSchedule(schedule, edges, {isForwardOnly(schedule)});
  const ActionTable table(schedule, edges);
  InOrder in_order(table, costs);
  SimulatedSchedule out = play(table, costs, in_order);
  out.peak_in_flight = peakInFlight(schedule);
  return out;
}

std::vector<int64_t> peakBytes(const Schedule& schedule, const ScheduleCosts& costs) {
  std::vector<int64_t> peaks;
  for (int32_t place = 0; place < schedule.numPlaces(); ++place) {
    int64_t now = 0;
    for (int32_t stage : schedule.stagesOf(place)) {
      now += costs.stages[static_cast<size_t>(stage)].fixed_bytes;
    }
    int64_t peak = now;
    for (const std::optional<Action>& cell : schedule.cells[static_cast<size_t>(place)]) {
      if (!cell) {
        continue;
      }
      const StageCost& cost = costs.stages[static_cast<size_t>(cell->stage)];
      switch (cell->kind) {
        case ActionKind::kForward:
          now += cost.activation_bytes;
          break;
        case ActionKind::kBackward:
          now -= cost.activation_bytes;
          break;
        case ActionKind::kBackwardInput:
          now += cost.weight_bytes - cost.activation_bytes;
          break;
        case ActionKind::kBackwardWeight:
          now -= cost.weight_bytes;
          break;
      }
      peak = std::max(peak, now);
    }
    peaks.push_back(peak);
  }
  return peaks;
}

std::vector<int32_t> peakInFlight(const Schedule& schedule) {
  const size_t num_stages = schedule.segments.isDivided() ? schedule.segments.counts().size() : static_cast<size_t>(schedule.num_stages);
  const auto num_microbatches = static_cast<size_t>(schedule.num_microbatches);
  std::vector<int32_t> now(num_stages, 0);
  std::vector<int32_t> peak = now;
  std::vector<int32_t> open(num_stages * num_microbatches, 0);  // by stage and microbatch: segments in flight
  for (const auto& cells : schedule.cells) {
    for (const std::optional<Action>& cell : cells) {
      if (!cell) {
        continue;
      }
      const auto stage = static_cast<size_t>(schedule.segments.stageOf(cell->stage));
      int32_t& own = open[stage * num_microbatches + static_cast<size_t>(cell->microbatch)];
      switch (flightChangeOf(cell->kind)) {
        case FlightChange::kBegins:
          now[stage] += own++ == 0 ? 1 : 0;
          break;
        case FlightChange::kGoesOn:
          break;
        case FlightChange::kEnds:
          now[stage] -= --own == 0 ? 1 : 0;
          break;
      }
      peak[stage] = std::max(peak[stage], now[stage]);
    }
  }
  return peak;
}

}  // namespace xmesh::core
