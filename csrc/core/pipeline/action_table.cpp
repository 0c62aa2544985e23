#include "core/pipeline/action_table.h"

#include "core/error.h"

namespace xmesh::core {
namespace {

constexpr int64_t kNumKinds = 4;

int64_t indexOf(ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
      return 0;
    case ActionKind::kBackward:
      return 1;
    case ActionKind::kBackwardInput:
      return 2;
    case ActionKind::kBackwardWeight:
      return 3;
  }
  throw InvalidArgument("no such kind of action: " + std::to_string(static_cast<int>(kind)));
}

}  // namespace

std::vector<StageEdge> chainEdges(int32_t num_stages) {
  std::vector<StageEdge> edges;
  for (int32_t stage = 0; stage + 1 < num_stages; ++stage) {
    edges.push_back({stage, stage + 1});
  }
  return edges;
}

std::vector<StageEdge> edgesOfSegments(const Segments& segments, const std::vector<StageEdge>& edges) {
  if (!segments.isDivided()) {
    return edges;
  }
  const std::vector<int32_t> counts = segments.counts();
  std::vector<StageEdge> out;
  for (const StageEdge& edge : edges) {
    const auto num_stages = static_cast<int32_t>(counts.size());
    require(0 <= edge.from && edge.from < edge.to && edge.to < num_stages, "an edge goes from an earlier to a later of " +
                                                                               std::to_string(num_stages) + " stages, got " +
                                                                               std::to_string(edge.from) + " -> " + std::to_string(edge.to));
    out.push_back({segments.firstOf(edge.from) + counts[static_cast<size_t>(edge.from)] - 1, segments.firstOf(edge.to), edge.has_gradient});
  }
  for (size_t stage = 0; stage < counts.size(); ++stage) {
    const int32_t first = segments.firstOf(static_cast<int32_t>(stage));
    for (int32_t segment = first; segment + 1 < first + counts[stage]; ++segment) {
      out.push_back({segment, segment + 1});
    }
  }
  return out;
}

void refuseCell(const Schedule& schedule, CellPosition position, const std::string& message) {
  throw InvalidArgument("schedule '" + schedule.name + "', place " + std::to_string(position.place) + ", cell " + std::to_string(position.cell) +
                        ": " + message + "\n" + schedule.strAround(position));
}

ActionTable::ActionTable(const Schedule& schedule, std::vector<StageEdge> edges) : schedule_(schedule), edges_(std::move(edges)) {
  require(schedule.num_stages > 0 && schedule.num_microbatches > 0 && schedule.place_of_stage.size() == static_cast<size_t>(schedule.num_stages),
          "a schedule has at least one stage and one microbatch and a place for each stage, got " + std::to_string(schedule.num_stages) +
              " stages, " + std::to_string(schedule.num_microbatches) + " microbatches, " + std::to_string(schedule.place_of_stage.size()) +
              " places of stages");
  edges_into_.resize(static_cast<size_t>(schedule.num_stages));
  edges_out_of_.resize(static_cast<size_t>(schedule.num_stages));
  for (size_t i = 0; i < edges_.size(); ++i) {
    const StageEdge& edge = edges_[i];
    require(0 <= edge.from && edge.from < edge.to && edge.to < schedule.num_stages, "an edge goes from an earlier to a later of " +
                                                                                        std::to_string(schedule.num_stages) + " stages, got " +
                                                                                        std::to_string(edge.from) + " -> " + std::to_string(edge.to));
    edges_into_[static_cast<size_t>(edge.to)].push_back(static_cast<int32_t>(i));
    edges_out_of_[static_cast<size_t>(edge.from)].push_back(static_cast<int32_t>(i));
  }
  node_of_.assign(static_cast<size_t>(kNumKinds * schedule.num_stages * schedule.num_microbatches), -1);
  for (int32_t place = 0; place < schedule.numPlaces(); ++place) {
    first_node_.push_back(numNodes());
    const auto& cells = schedule.cells[static_cast<size_t>(place)];
    for (size_t i = 0; i < cells.size(); ++i) {
      if (cells[i]) {
        add(*cells[i], {place, static_cast<int32_t>(i)});
      }
    }
  }
  first_node_.push_back(numNodes());
  checkKinds();
}

int64_t ActionTable::slot(const Action& action) const {
  return (indexOf(action.kind) * schedule_.num_stages + action.stage) * schedule_.num_microbatches + action.microbatch;
}

void ActionTable::add(const Action& action, CellPosition position) {
  if (action.stage < 0 || action.stage >= schedule_.num_stages) {
    refuseCell(schedule_, position, action.str() + " names a stage outside 0.." + std::to_string(schedule_.num_stages - 1));
  }
  if (action.microbatch < 0 || action.microbatch >= schedule_.num_microbatches) {
    refuseCell(schedule_, position, schedule_.textOf(action) + " names a microbatch outside 0.." + std::to_string(schedule_.num_microbatches - 1));
  }
  const int32_t owner = schedule_.place_of_stage[static_cast<size_t>(action.stage)];
  if (owner != position.place) {
    refuseCell(schedule_, position, schedule_.textOf(action) + " is on another place than its stage, which is on place " + std::to_string(owner));
  }
  int32_t& node = node_of_[static_cast<size_t>(slot(action))];
  if (node >= 0) {
    refuseCell(schedule_, position,
               schedule_.textOf(action) + " is doubled: it stands in cell " + std::to_string(this->position(node).cell) + " already");
  }
  node = numNodes();
  actions_.push_back(action);
  positions_.push_back(position);
}

void ActionTable::checkKinds() const {
  for (int32_t node = 0; node < numNodes(); ++node) {
    const Action& action = actions_[static_cast<size_t>(node)];
    const bool is_split = crossingOf(action.kind) != Crossing::kValues && action.kind != ActionKind::kBackward;
    if (!is_split) {
      continue;
    }
    const Action full{ActionKind::kBackward, action.stage, action.microbatch};
    if (find(full) >= 0) {
      refuseCell(schedule_, position(node),
                 schedule_.textOf(action) + " doubles part of " + schedule_.textOf(full) + ": a backward is either B, or I and W");
    }
  }
}

int32_t ActionTable::find(const Action& action) const { return node_of_[static_cast<size_t>(slot(action))]; }

int32_t ActionTable::findInputGradient(int32_t stage, int32_t microbatch) const {
  const int32_t full = find({ActionKind::kBackward, stage, microbatch});
  return full >= 0 ? full : find({ActionKind::kBackwardInput, stage, microbatch});
}

std::vector<ActionTable::Dependency> ActionTable::dependenciesOf(int32_t node) const {
  const Action& action = this->action(node);
  const auto stage = static_cast<size_t>(action.stage);
  std::vector<Dependency> out;
  const auto push = [&out](int32_t first, int32_t edge) {
    if (first >= 0) {
      out.push_back({first, edge});
    }
  };
  switch (crossingOf(action.kind)) {
    case Crossing::kValues:
      for (int32_t edge : edges_into_[stage]) {
        push(find({ActionKind::kForward, edges_[static_cast<size_t>(edge)].from, action.microbatch}), edge);
      }
      break;
    case Crossing::kGradients:
      push(find({ActionKind::kForward, action.stage, action.microbatch}), -1);
      for (int32_t edge : edges_out_of_[stage]) {
        if (edges_[static_cast<size_t>(edge)].has_gradient) {
          push(findInputGradient(edges_[static_cast<size_t>(edge)].to, action.microbatch), edge);
        }
      }
      break;
    case Crossing::kNothing:
      push(find({ActionKind::kBackwardInput, action.stage, action.microbatch}), -1);
      break;
  }
  return out;
}

}  // namespace xmesh::core
