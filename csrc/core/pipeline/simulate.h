#pragma once

#include <cstdint>
#include <vector>

#include "core/pipeline/action_table.h"

namespace xmesh::core {

/// What one microbatch takes and holds on one stage.
struct StageCost {
  double forward_s = 0;
  double backward_s = 0;         ///< B
  double backward_input_s = 0;   ///< I
  double backward_weight_s = 0;  ///< W
  int64_t activation_bytes = 0;  ///< held from F until the end of B or I
  int64_t weight_bytes = 0;      ///< held from I until the end of W
  int64_t fixed_bytes = 0;       ///< held anyway: parameters, buffers for what comes
  double sums_s = 0;             ///< once a step, behind its last B or W: gradients are summed among the place's devices, over their links
};

/// One microbatch's way between two stages in one direction: how long it takes with both NICs to itself.
struct TransferCost {
  double seconds = 0;     ///< known time, e.g. a reshard plan's predicted_seconds
  int64_t num_bytes = 0;  ///< adds num_bytes / nic_bytes_per_s

  bool operator==(const TransferCost&) const = default;
};

struct EdgeCost {
  StageEdge edge;
  TransferCost forward;
  TransferCost backward;
  /// Where both stages are on one place: true: the values lie otherwise for the later one, and are on their way among the place's devices. False:
  /// they are handed over at once.
  bool is_resharded = false;
};

struct ScheduleCosts {
  std::vector<StageCost> stages;  ///< one per stage
  std::vector<EdgeCost> edges;    ///< every edge; one without cost still orders its stages
  double nic_bytes_per_s = 0;     ///< one way, of each place; needed where an edge has bytes
  double latency_s = 0;           ///< from the last byte sent until the value can be used
  /// True: transfers run beside computation. False: after each action the place's compute thread waits until the action's values are sent.
  bool overlap = true;
  /// Without overlap: a transfer takes the receiver's compute thread too, one at a time; it starts only while that one does not compute.
  bool blocks_receiver = true;
  /// By stage: whether its place, before it waits for a value, runs the next W of its list if that is ready. Empty: none does.
  std::vector<uint8_t> runs_weights_early;
  /// By stage: those of one number add to the same gradients, so that their B and W keep the order of the list. Empty: all of a place do.
  std::vector<int32_t> weights_group;
  /// By stage: whether the devices of its place are on one host, so that what goes among them does not load its NIC. Empty: none are.
  std::vector<uint8_t> is_on_one_host;
  /// Every action and transfer takes up to this part longer or shorter, by chance.
  double noise = 0;
  uint64_t noise_seed = 0;
};

/// Without their costs.
std::vector<StageEdge> edgesOf(const ScheduleCosts& costs);

/// An action in time.
struct ActionSpan {
  int32_t place = 0;
  Action action;
  double start_s = 0;
  double end_s = 0;
};

/// A transfer in time: between stages of different places, or among the devices of one.
struct TransferSpan {
  int32_t from_stage = 0;  ///< a gradient goes from a later to an earlier stage
  int32_t to_stage = 0;    ///< the same where gradients are summed
  int32_t microbatch = 0;  ///< -1 where gradients are summed
  double ready_s = 0;      ///< the value exists
  double start_s = 0;      ///< it moves from here on, at its share of the NICs
  double end_s = 0;        ///< it can be used
};

struct SimulatedSchedule {
  double makespan_s = 0;
  std::vector<double> busy_s;           ///< by place: seconds of computation
  std::vector<int32_t> peak_in_flight;  ///< by stage
  std::vector<ActionSpan> actions;      ///< by start
  std::vector<TransferSpan> transfers;  ///< by start
  /// 1 - busy seconds of all places / (places * makespan); 0 for a makespan of 0.
  double bubbleFraction() const;
};

/// Throws InvalidArgument for costs of another number of stages, or that are negative or not finite.
void checkCosts(int32_t num_stages, const ScheduleCosts& costs);

/// Plays a schedule: places run their lists in order, an action starts once its place is free and its values are there. A place has one NIC, full
/// duplex: transfers from one place to another follow one another, as do those within a place, which load both directions, or, if it is one host's,
/// none; what takes no time there is handed over at once. Those of different pairs share the NICs as TCP's flows do (`NicSharing`); where receivers
/// block a place receives one at a time. Deterministic. Throws InvalidArgument for costs that do not fit or are negative, and for a schedule that
/// validateSchedule() refuses (a schedule without any backward is taken as one of forwards only).
SimulatedSchedule simulateSchedule(const Schedule& schedule, const ScheduleCosts& costs);

/// By place: the most bytes that its stages hold at once, as their costs say.
std::vector<int64_t> peakBytes(const Schedule& schedule, const ScheduleCosts& costs);

/// By stage: the most microbatches between their F and the end of their B or W (those whose activations are held).
std::vector<int32_t> peakInFlight(const Schedule& schedule);

}  // namespace xmesh::core
