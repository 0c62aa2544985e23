#pragma once

#include <cstdint>
#include <vector>

#include "core/pipeline/action_table.h"

namespace xmesh::core {

/// Runs a table's actions as far as they go: every place in list order, an action once all it waits for is done, sends buffered without bound.
struct Replay {
  std::vector<int32_t> step;        ///< by node: the unit of time in which it runs when every action takes one; -1 where it never runs
  std::vector<int32_t> stuck_node;  ///< by place: the first action that never runs, -1 where the list ends
};
Replay replay(const ActionTable& table);

}  // namespace xmesh::core
