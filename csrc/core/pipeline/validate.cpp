#include "core/pipeline/validate.h"

#include <algorithm>

#include "core/error.h"
#include "core/pipeline/replay.h"

namespace xmesh::core {
namespace {

/// Throws for an action that is missing; the mark goes to the place's last cell, where the list ends without it.
[[noreturn]] void refuseMissing(const ActionTable& table, const std::string& missing, int32_t stage) {
  const Schedule& schedule = table.schedule();
  const int32_t place = schedule.place_of_stage[static_cast<size_t>(stage)];
  require(place >= 0 && place < schedule.numPlaces(), "schedule '" + schedule.name + "': " + schedule.segments.nameOf(stage) + " is on place " +
                                                          std::to_string(place) + ", expected one of " + std::to_string(schedule.numPlaces()) +
                                                          " places");
  const auto num_cells = static_cast<int32_t>(schedule.cells[static_cast<size_t>(place)].size());
  if (num_cells == 0) {
    throw InvalidArgument("schedule '" + schedule.name + "', place " + std::to_string(place) + ": " + missing +
                          " is missing; the place has no cells\n" + schedule.str());
  }
  refuseCell(schedule, {place, num_cells - 1}, missing + " is missing: the place's list ends without it");
}

void checkComplete(const ActionTable& table, ScheduleCheck check) {
  const Schedule& schedule = table.schedule();
  for (int32_t stage = 0; stage < schedule.num_stages; ++stage) {
    for (int32_t microbatch = 0; microbatch < schedule.num_microbatches; ++microbatch) {
      const Action forward{ActionKind::kForward, stage, microbatch};
      const Action backward{ActionKind::kBackward, stage, microbatch};
      const Action input{ActionKind::kBackwardInput, stage, microbatch};
      const Action weight{ActionKind::kBackwardWeight, stage, microbatch};
      const int32_t node = table.findInputGradient(stage, microbatch);
      const int32_t weight_node = table.find(weight);
      if (table.find(forward) < 0) {
        refuseMissing(table, schedule.textOf(forward), stage);
      }
      if (check.is_forward_only) {
        if (node >= 0 || weight_node >= 0) {
          const int32_t extra = node >= 0 ? node : weight_node;
          refuseCell(schedule, table.position(extra), schedule.textOf(table.action(extra)) + " is a backward in a schedule of forwards only");
        }
        continue;
      }
      if (node < 0) {
        refuseMissing(table,
                      weight_node >= 0 ? schedule.textOf(input)
                                       : schedule.textOf(backward) + " (or " + schedule.textOf(input) + " and " + schedule.textOf(weight) + ")",
                      stage);
      }
      if (table.action(node).kind == ActionKind::kBackwardInput && weight_node < 0) {
        refuseMissing(table, schedule.textOf(weight), stage);
      }
    }
  }
}

void checkOrder(const ActionTable& table) {
  for (int32_t node = 0; node < table.numNodes(); ++node) {
    for (const ActionTable::Dependency& dependency : table.dependenciesOf(node)) {
      if (table.placeOf(dependency.node) == table.placeOf(node) && dependency.node > node) {
        refuseCell(table.schedule(), table.position(node),
                   table.schedule().textOf(table.action(node)) + " comes before " + table.schedule().textOf(table.action(dependency.node)) +
                       " (cell " + std::to_string(table.position(dependency.node).cell) + "), which it needs");
      }
    }
  }
}

/// The first action in list order that `stuck` waits for and that never runs; only called for a place's first stuck action.
int32_t blockerOf(const ActionTable& table, const Replay& replayed, int32_t stuck) {
  for (const ActionTable::Dependency& dependency : table.dependenciesOf(stuck)) {
    if (replayed.step[static_cast<size_t>(dependency.node)] < 0) {
      return dependency.node;
    }
  }
  return -1;
}

void checkBuffered(const ActionTable& table) {
  const Replay replayed = replay(table);
  const auto stuck_place = std::find_if(replayed.stuck_node.begin(), replayed.stuck_node.end(), [](int32_t node) { return node >= 0; });
  if (stuck_place == replayed.stuck_node.end()) {
    return;
  }
  std::vector<bool> is_seen(replayed.stuck_node.size(), false);
  int32_t node = *stuck_place;
  while (!is_seen[static_cast<size_t>(table.placeOf(node))]) {
    is_seen[static_cast<size_t>(table.placeOf(node))] = true;
    node = replayed.stuck_node[static_cast<size_t>(table.placeOf(blockerOf(table, replayed, node)))];
  }
  std::string circle;
  const int32_t start = node;
  do {
    const int32_t blocker = blockerOf(table, replayed, node);
    const int32_t head = replayed.stuck_node[static_cast<size_t>(table.placeOf(blocker))];
    circle += (circle.empty() ? "" : "; ") + std::string("place ") + std::to_string(table.placeOf(node)) + " at " +
              table.schedule().textOf(table.action(node)) + " waits for " + table.schedule().textOf(table.action(blocker)) + " of place " +
              std::to_string(table.placeOf(blocker));
    node = head;
  } while (node != start);
  refuseCell(table.schedule(), table.position(start), "deadlock with buffered sends: " + circle);
}

/// Pairs (producing node, using node) of one edge and direction.
using Pairs = std::vector<std::pair<int32_t, int32_t>>;

void checkCommunicator(const ActionTable& table, const StageEdge& edge, bool is_backward, Pairs pairs) {
  std::sort(pairs.begin(), pairs.end());
  Pairs by_use = pairs;
  std::sort(by_use.begin(), by_use.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  for (size_t k = 0; k < pairs.size(); ++k) {
    if (pairs[k] == by_use[k]) {
      continue;
    }
    const Segments& segments = table.schedule().segments;
    const std::string from = segments.nameOf(is_backward ? edge.to : edge.from);
    const std::string to = segments.nameOf(is_backward ? edge.from : edge.to);
    const int32_t user = by_use[k].second;
    refuseCell(table.schedule(), table.position(user),
               std::string("deadlock with in-order rendezvous: ") + (is_backward ? "gradient" : "value") + " number " + std::to_string(k) + " from " +
                   from + " to " + to + " is sent for " + table.schedule().textOf(table.action(pairs[k].second)) + " (after " +
                   table.schedule().textOf(table.action(pairs[k].first)) + ") but received for " + table.schedule().textOf(table.action(user)));
  }
}

void checkRendezvous(const ActionTable& table) {
  std::vector<Pairs> forward(table.edges().size());
  std::vector<Pairs> backward(table.edges().size());
  for (int32_t node = 0; node < table.numNodes(); ++node) {
    for (const ActionTable::Dependency& dependency : table.dependenciesOf(node)) {
      if (dependency.edge >= 0 && table.placeOf(dependency.node) != table.placeOf(node)) {
        auto& pairs = crossingOf(table.action(node).kind) == Crossing::kValues ? forward : backward;
        pairs[static_cast<size_t>(dependency.edge)].emplace_back(dependency.node, node);
      }
    }
  }
  for (size_t i = 0; i < table.edges().size(); ++i) {
    checkCommunicator(table, table.edges()[i], false, std::move(forward[i]));
    checkCommunicator(table, table.edges()[i], true, std::move(backward[i]));
  }
}

}  // namespace

void validateSchedule(const Schedule& schedule, const std::vector<StageEdge>& edges, ScheduleCheck check) {
  const ActionTable table(schedule, edges);
  checkComplete(table, check);
  checkOrder(table);
  checkBuffered(table);
  checkRendezvous(table);
}

}  // namespace xmesh::core
