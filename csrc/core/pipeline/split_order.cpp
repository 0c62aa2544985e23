#include "core/pipeline/split_order.h"

#include <algorithm>
#include <deque>

#include "core/pipeline/play.h"

namespace xmesh::core {
namespace {

/// What each stage has done so far, microbatch by microbatch, and the W that a place owes.
class Progress {
 public:
  Progress(const ActionTable& table, std::vector<int32_t> most_in_flight)
      : table_(table), most_in_flight_(std::move(most_in_flight)), owed_(static_cast<size_t>(table.schedule().numPlaces())) {
    forwards_.resize(most_in_flight_.size(), 0);
    inputs_ = weights_ = forwards_;
  }

  int32_t node(ActionKind kind, int32_t stage, int32_t microbatch) const { return table_.find({kind, stage, microbatch}); }
  int32_t nextForward(int32_t stage) const { return nextOf(ActionKind::kForward, stage, forwards_); }
  int32_t nextInput(int32_t stage) const { return nextOf(ActionKind::kBackwardInput, stage, inputs_); }
  int32_t beforeGradient(int32_t stage) const { return forwards_[index(stage)] - inputs_[index(stage)]; }
  bool isFull(int32_t stage) const { return forwards_[index(stage)] - weights_[index(stage)] >= most_in_flight_[index(stage)]; }
  bool owes(int32_t place) const { return !owed_[static_cast<size_t>(place)].empty(); }
  /// The oldest W that a place owes.
  int32_t payOldest(int32_t place) {
    std::deque<int32_t>& owed = owed_[static_cast<size_t>(place)];
    return begin(owed.front());
  }

  /// Notes that a place begins an action.
  int32_t begin(int32_t node) {
    const Action& action = table_.action(node);
    std::deque<int32_t>& owed = owed_[static_cast<size_t>(table_.placeOf(node))];
    switch (action.kind) {
      case ActionKind::kForward:
        ++forwards_[index(action.stage)];
        break;
      case ActionKind::kBackwardInput:
        ++inputs_[index(action.stage)];
        owed.push_back(this->node(ActionKind::kBackwardWeight, action.stage, action.microbatch));
        break;
      case ActionKind::kBackwardWeight:
        ++weights_[index(action.stage)];
        std::erase(owed, node);
        break;
      case ActionKind::kBackward:
        break;
    }
    return node;
  }

 private:
  static size_t index(int32_t stage) { return static_cast<size_t>(stage); }
  int32_t nextOf(ActionKind kind, int32_t stage, const std::vector<int32_t>& done) const {
    const int32_t microbatch = done[index(stage)];
    return microbatch < table_.schedule().num_microbatches ? node(kind, stage, microbatch) : -1;
  }

  const ActionTable& table_;
  const std::vector<int32_t> most_in_flight_;  ///< by stage
  std::vector<int32_t> forwards_;              ///< by stage: begun, as the two below
  std::vector<int32_t> inputs_;
  std::vector<int32_t> weights_;
  std::vector<std::deque<int32_t>> owed_;  ///< by place: W whose I has begun, oldest first
};

class ByRule final : public Chooser {
 public:
  ByRule(const ActionTable& table, const SplitRule& rule) : rule_(rule), progress_(table, rule.most_in_flight) {
    for (int32_t place = 0; place < table.schedule().numPlaces(); ++place) {
      stages_of_.push_back(table.schedule().stagesOf(place));
      std::reverse(stages_of_.back().begin(), stages_of_.back().end());
    }
  }

  int32_t choose(int32_t place, const std::vector<int32_t>& waits_for) override {
    const auto isReady = [&](int32_t node) { return node >= 0 && waits_for[static_cast<size_t>(node)] == 0; };
    const std::vector<int32_t>& stages = stages_of_[static_cast<size_t>(place)];
    for (int32_t stage : stages) {
      if (isReady(progress_.nextInput(stage))) {
        return progress_.begin(progress_.nextInput(stage));
      }
    }
    for (int32_t stage : stages) {
      const bool may_go_on = !progress_.isFull(stage) && progress_.beforeGradient(stage) < rule_.most_before_gradient[static_cast<size_t>(stage)];
      if (may_go_on && isReady(progress_.nextForward(stage))) {
        return progress_.begin(progress_.nextForward(stage));
      }
    }
    return progress_.owes(place) ? progress_.payOldest(place) : -1;
  }

 private:
  const SplitRule& rule_;
  Progress progress_;
  std::vector<std::vector<int32_t>> stages_of_;  ///< by place, the latest first
};

/// Keeps the order of F and I that the places' lists have in `whole`, where I is B.
class WeightsInWaits final : public Chooser {
 public:
  WeightsInWaits(const ActionTable& table, const Schedule& whole, const std::vector<int32_t>& most_in_flight)
      : table_(table), progress_(table, most_in_flight) {
    for (int32_t place = 0; place < whole.numPlaces(); ++place) {
      std::deque<int32_t>& list = lists_.emplace_back();
      for (const Action& action : whole.actionsOf(place)) {
        const ActionKind kind = action.kind == ActionKind::kBackward ? ActionKind::kBackwardInput : action.kind;
        list.push_back(table.find({kind, action.stage, action.microbatch}));
      }
    }
  }

  int32_t choose(int32_t place, const std::vector<int32_t>& waits_for) override {
    std::deque<int32_t>& list = lists_[static_cast<size_t>(place)];
    if (!list.empty() && waits_for[static_cast<size_t>(list.front())] == 0) {
      const Action& next = table_.action(list.front());
      if (next.kind != ActionKind::kForward || !progress_.isFull(next.stage) || !progress_.owes(place)) {
        const int32_t node = list.front();
        list.pop_front();
        return progress_.begin(node);
      }
    }
    return progress_.owes(place) ? progress_.payOldest(place) : -1;
  }

 private:
  const ActionTable& table_;
  Progress progress_;
  std::vector<std::deque<int32_t>> lists_;  ///< by place: F and I that have not begun
};

}  // namespace

ScheduleCosts unitCosts(const PipelineShape& shape, double transfer) {
  ScheduleCosts costs;
  costs.stages.assign(static_cast<size_t>(shape.num_stages), {1, 2, 1, 1});
  for (const StageEdge& edge : chainEdges(shape.num_stages)) {
    costs.edges.push_back({edge, {transfer, 0}, {transfer, 0}});
  }
  return costs;
}

Schedule allActions(const PipelineShape& shape, bool is_split) {
  Schedule out{"", shape.num_stages, shape.num_microbatches, shape.place_of_stage, {}};
  out.cells.resize(static_cast<size_t>(shape.numPlaces()));
  std::vector<ActionKind> kinds = {ActionKind::kForward, ActionKind::kBackward};
  if (is_split) {
    kinds = {ActionKind::kForward, ActionKind::kBackwardInput, ActionKind::kBackwardWeight};
  }
  for (int32_t stage = 0; stage < shape.num_stages; ++stage) {
    auto& cells = out.cells[static_cast<size_t>(shape.place_of_stage[static_cast<size_t>(stage)])];
    for (const ActionKind kind : kinds) {
      for (int32_t microbatch = 0; microbatch < shape.num_microbatches; ++microbatch) {
        cells.emplace_back(Action{kind, stage, microbatch});
      }
    }
  }
  return out;
}

Schedule asPlayed(const std::string& name, const Schedule& all, const SimulatedSchedule& played) {
  Schedule out = all;
  out.name = name;
  out.cells.assign(all.cells.size(), {});
  for (const ActionSpan& span : played.actions) {
    out.cells[static_cast<size_t>(span.place)].emplace_back(span.action);
  }
  return out;
}

Schedule splitAsReady(const std::string& name, const PipelineShape& shape, const SplitRule& rule, const ScheduleCosts& costs) {
  const Schedule all = allActions(shape);
  const ActionTable table(all, edgesOf(costs));
  ByRule by_rule(table, rule);
  return asPlayed(name, all, play(table, costs, by_rule));
}

Schedule splitInWaits(const std::string& name, const Schedule& whole, const std::vector<int32_t>& most_in_flight, const ScheduleCosts& costs) {
  const Schedule all = allActions({whole.num_stages, whole.num_microbatches, whole.place_of_stage});
  const ActionTable table(all, edgesOf(costs));
  WeightsInWaits in_waits(table, whole, most_in_flight);
  return asPlayed(name, all, play(table, costs, in_waits));
}

}  // namespace xmesh::core
