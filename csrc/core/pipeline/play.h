#pragma once

#include <cstdint>
#include <vector>

#include "core/pipeline/action_table.h"
#include "core/pipeline/simulate.h"

namespace xmesh::core {

/// Decides what the places of a pipeline do next while it is played.
class Chooser {
 public:
  virtual ~Chooser() = default;
  /// The action (a node of the table) that a free place begins now: one that has not begun and whose entry in `waits_for`, the values and actions
  /// that it still waits for, is 0. -1: the place waits until something changes.
  virtual int32_t choose(int32_t place, const std::vector<int32_t>& waits_for) = 0;
};

/// Each place runs its list in order. Before it waits it runs, where the costs say so, the next W of the list, unless another B or W that adds to the
/// same gradients stands before that: they are added in the list's order whatever comes late.
class InOrder final : public Chooser {
 public:
  InOrder(const ActionTable& table, const ScheduleCosts& costs);
  int32_t choose(int32_t place, const std::vector<int32_t>& waits_for) override;

 private:
  const ActionTable& table_;
  const ScheduleCosts& costs_;
  std::vector<int32_t> next_;                 ///< by place: the first that has not run
  std::vector<bool> has_run_;                 ///< by node
  std::vector<int32_t> next_adding_;          ///< by node: the next of its place that adds to the same gradients, or that one's end
  std::vector<std::vector<int32_t>> adding_;  ///< by place and group: the first that has not run
};

/// Plays the table's actions in the order that `chooser` gives; costs.edges are the table's. All that has ended or arrived by a moment is known when
/// a place chooses at it. Leaves `peak_in_flight` empty. Deterministic if the chooser is.
SimulatedSchedule play(const ActionTable& table, const ScheduleCosts& costs, Chooser& chooser);

}  // namespace xmesh::core
