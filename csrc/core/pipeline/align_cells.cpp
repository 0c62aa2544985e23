#include "core/error.h"
#include "core/pipeline/action_table.h"
#include "core/pipeline/generators.h"
#include "core/pipeline/replay.h"

namespace xmesh::core {

Schedule alignCells(const Schedule& schedule) {
  const ActionTable table(schedule, chainEdges(schedule.num_stages));
  const Replay replayed = replay(table);
  Schedule out = schedule;
  for (int32_t place = 0; place < schedule.numPlaces(); ++place) {
    const int32_t stuck = replayed.stuck_node[static_cast<size_t>(place)];
    if (stuck >= 0) {
      refuseCell(schedule, table.position(stuck), schedule.textOf(table.action(stuck)) + " never runs: the schedule deadlocks");
    }
    auto& cells = out.cells[static_cast<size_t>(place)];
    cells.clear();
    for (int32_t node = table.firstNode(place); node < table.firstNode(place + 1); ++node) {
      cells.resize(static_cast<size_t>(replayed.step[static_cast<size_t>(node)]));
      cells.emplace_back(table.action(node));
    }
  }
  return out;
}

}  // namespace xmesh::core
