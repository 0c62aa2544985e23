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

/// Each place runs its list in order. Before it waits it runs, where the costs say so, the next W of the list, unless a B stands before that:
/// gradients are added in the list's order whatever comes late.
class InOrder final : public Chooser {
 public:
  InOrder(const ActionTable& table, const ScheduleCosts& costs);
  int32_t choose(int32_t place, const std::vector<int32_t>& waits_for) override;

 private:
  /// The next node from `node` on that adds to weight gradients, as far as the place's list goes.
  int32_t nextAdding(int32_t place, int32_t node) const;

  const ActionTable& table_;
  const ScheduleCosts& costs_;
  std::vector<int32_t> next_;    ///< by place: the first that has not run and need not be W
  std::vector<int32_t> adding_;  ///< by place: the first that has not run of those that add to weight gradients
};

/// Plays the table's actions in the order that `chooser` gives; costs.edges are the table's. All that has ended or arrived by a moment is known when
/// a place chooses at it. Leaves `peak_in_flight` empty. Deterministic if the chooser is.
SimulatedSchedule play(const ActionTable& table, const ScheduleCosts& costs, Chooser& chooser);

}  // namespace xmesh::core
