#pragma once

#include <cstdint>
#include <vector>

#include "core/pipeline/schedule.h"

namespace xmesh::core {

/// A value goes from one stage to a later one: the next one, or any other (a skip connection goes straight to each stage that uses it).
struct StageEdge {
  int32_t from = 0;
  int32_t to = 0;
  bool has_gradient = true;  ///< false: nothing of it needs a gradient, so nothing comes back

  bool operator==(const StageEdge&) const = default;
};

/// Stage s to stage s + 1.
std::vector<StageEdge> chainEdges(int32_t num_stages);

/// Edges between stages as those between their segments, from the last one of a stage to the first one of another; and each stage's segments as a
/// chain. As they are where no stage is divided. Throws InvalidArgument for a stage that does not exist.
std::vector<StageEdge> edgesOfSegments(const Segments& segments, const std::vector<StageEdge>& edges);

/// Throws InvalidArgument with the message, the place's and cell's number and the grid around the cell, which is marked.
[[noreturn]] void refuseCell(const Schedule& schedule, CellPosition position, const std::string& message);

/// A schedule's actions numbered place by place in list order, and what each waits for. Keeps a reference to the schedule.
class ActionTable {
 public:
  /// What an action waits for.
  struct Dependency {
    int32_t node = 0;   ///< the action that comes first
    int32_t edge = -1;  ///< index of the edge that carries a value from it (a gradient goes against the edge); -1 inside a stage
  };

  /// Throws InvalidArgument, the cell marked, for an action that is doubled, of a stage or microbatch that does not exist, on another place than its
  /// stage, or B beside I or W of the same; and for an edge that is no pair of an earlier and a later stage. Missing actions are left to the caller.
  ActionTable(const Schedule& schedule, std::vector<StageEdge> edges);

  const Schedule& schedule() const { return schedule_; }
  const std::vector<StageEdge>& edges() const { return edges_; }
  int32_t numNodes() const { return static_cast<int32_t>(actions_.size()); }
  const Action& action(int32_t node) const { return actions_[static_cast<size_t>(node)]; }
  CellPosition position(int32_t node) const { return positions_[static_cast<size_t>(node)]; }
  int32_t placeOf(int32_t node) const { return position(node).place; }
  /// A place's nodes are [firstNode(place), firstNode(place + 1)), in list order.
  int32_t firstNode(int32_t place) const { return first_node_[static_cast<size_t>(place)]; }
  /// Node of an action, -1 where the schedule has none.
  int32_t find(const Action& action) const;
  /// Node of B or I of a stage and microbatch, -1 where there is neither.
  int32_t findInputGradient(int32_t stage, int32_t microbatch) const;
  /// What `node` waits for, beside what stands before it on its place; actions that the schedule lacks are left out.
  std::vector<Dependency> dependenciesOf(int32_t node) const;

 private:
  int64_t slot(const Action& action) const;
  void add(const Action& action, CellPosition position);
  void checkKinds() const;

  const Schedule& schedule_;
  std::vector<StageEdge> edges_;
  std::vector<std::vector<int32_t>> edges_into_;
  std::vector<std::vector<int32_t>> edges_out_of_;
  std::vector<Action> actions_;
  std::vector<CellPosition> positions_;
  std::vector<int32_t> first_node_;
  std::vector<int32_t> node_of_;  ///< by slot()
};

}  // namespace xmesh::core
