#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/pipeline/simulate.h"

namespace xmesh::core {

struct ScheduleQuestion {
  ScheduleCosts costs;                  ///< of segments, where stages are divided
  std::vector<int32_t> place_of_stage;  ///< by stage
  int32_t num_microbatches = 0;
  std::optional<int64_t> memory_limit_bytes;  ///< of each place
  Segments segments{};
};

/// A schedule that was considered.
struct ScheduleCandidate {
  Schedule schedule;
  double step_s = 0;                ///< simulated
  double noisy_s = 0;               ///< the mean of that and of runs with noise: what candidates are compared by
  bool runs_weights_early = false;  ///< it is faster where W may run early; the times are with that
  std::vector<int64_t> peak_bytes;  ///< by place
  int64_t peak() const;             ///< of the fullest place
};

struct ScheduleChoice {
  std::vector<ScheduleCandidate> candidates;  ///< by noisy_s
  int32_t best = -1;                          ///< the best candidate that keeps the limit; -1 where none does
};

/// Plays every schedule that can be made for these places, and orders planned for these very costs, and takes the fastest that keeps the limit.
///
/// A planned order is list scheduling (`splitAsReady`) with the costs themselves: "delay the least that covers the communication" (AlpaComm, section
/// 4). It is tried with several bounds on the microbatches in flight, and for each with costs perturbed by chance, since a list schedule made for
/// slightly other costs is often better (perturbed list scheduling; Ramalingam et al., 2021). What is compared is the mean over several runs with
/// noise, so that an order without slack does not win. Where the costs let W run early, each order is played with that and without: a W that is begun
/// just before a value comes delays what waits for it. Of those within 0.3 % of the fastest the one that holds least is taken. Deterministic. Bounds
/// for a long schedule are tried on its first microbatches.
///
/// Where stages are divided into segments, the planned orders are of these (`orderSegments`): from every schedule by name and some that hold one or
/// two microbatches more, with two to four actions under way at once. Throws InvalidArgument for costs that do not fit.
ScheduleChoice chooseSchedule(const ScheduleQuestion& question);

}  // namespace xmesh::core
