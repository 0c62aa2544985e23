#include "core/pipeline/segment_order.h"

#include <algorithm>
#include <deque>

#include "core/pipeline/play.h"
#include "core/pipeline/split_order.h"

namespace xmesh::core {
namespace {

PipelineShape shapeOfSegments(const Schedule& stages, const Segments& segments) {
  const Schedule divided = dividedInto(stages, segments);
  return {divided.num_stages, divided.num_microbatches, divided.place_of_stage};
}

bool isForward(ActionKind kind) { return crossingOf(kind) == Crossing::kValues; }

class OpenActions final : public Chooser {
 public:
  OpenActions(const ActionTable& table, const Schedule& stages, const Segments& segments, const SegmentRule& rule)
      : table_(table), segments_(segments), rule_(rule), places_(static_cast<size_t>(stages.numPlaces())), held_(peakInFlight(stages)) {
    for (int32_t place = 0; place < stages.numPlaces(); ++place) {
      for (const Action& action : stages.actionsOf(place)) {
        places_[static_cast<size_t>(place)].open.push_back({action, 0});
      }
    }
    for (int32_t& most : held_) {
      most += rule.most_open - 1;
    }
    in_flight_.resize(held_.size(), 0);
    weights_left_.resize(held_.size() * static_cast<size_t>(stages.num_microbatches), 0);
    for (size_t i = 0; i < weights_left_.size(); ++i) {
      weights_left_[i] = segments.countOf(static_cast<int32_t>(i) / stages.num_microbatches);
    }
  }

  int32_t choose(int32_t place, const std::vector<int32_t>& waits_for) override {
    PlaceList& list = places_[static_cast<size_t>(place)];
    int32_t found = -1;
    for (int32_t i = 0; i < std::min(rule_.most_open, static_cast<int32_t>(list.open.size())); ++i) {
      const Open& open = list.open[static_cast<size_t>(i)];
      const bool is_full = open.done == 0 && isForward(open.action.kind) && isFull(open.action.stage) && !list.owed.empty();
      if (is_full || waits_for[static_cast<size_t>(nodeOf(open))] != 0) {
        continue;
      }
      const bool goes_first =
          rule_.backward_first && found >= 0 && !isForward(open.action.kind) && isForward(list.open[static_cast<size_t>(found)].action.kind);
      found = found < 0 || goes_first ? i : found;
    }
    if (found >= 0) {
      return begin(list, found);
    }
    if (list.owed.empty()) {
      return -1;
    }
    const int32_t node = list.owed.front();
    list.owed.pop_front();
    note(table_.action(node));
    return node;
  }

 private:
  /// An action of a stage, and how many of its segments have begun.
  struct Open {
    Action action;
    int32_t done = 0;
  };
  struct PlaceList {
    std::deque<Open> open;     ///< those that have not ended, in the order of the list
    std::deque<int32_t> owed;  ///< W whose I has begun, oldest first
  };

  bool isFull(int32_t stage) const { return in_flight_[static_cast<size_t>(stage)] >= held_[static_cast<size_t>(stage)]; }

  int32_t nodeOf(const Open& open) const {
    const int32_t count = segments_.countOf(open.action.stage);
    const int32_t segment = segments_.firstOf(open.action.stage) + (isForward(open.action.kind) ? open.done : count - 1 - open.done);
    const ActionKind backward = rule_.is_split ? ActionKind::kBackwardInput : ActionKind::kBackward;
    return table_.find({isForward(open.action.kind) ? ActionKind::kForward : backward, segment, open.action.microbatch});
  }

  int32_t begin(PlaceList& list, int32_t index) {
    Open& open = list.open[static_cast<size_t>(index)];
    const int32_t node = nodeOf(open);
    const Action& action = table_.action(node);
    if (isForward(action.kind)) {
      in_flight_[static_cast<size_t>(open.action.stage)] += open.done == 0 ? 1 : 0;
    } else if (rule_.is_split) {
      list.owed.push_back(table_.find({ActionKind::kBackwardWeight, action.stage, action.microbatch}));
    } else {
      note(action);
    }
    if (++open.done == segments_.countOf(open.action.stage)) {
      list.open.erase(list.open.begin() + index);
    }
    return node;
  }

  /// Notes a B or W of a segment.
  void note(const Action& action) {
    const int32_t stage = segments_.stageOf(action.stage);
    const size_t at = static_cast<size_t>(stage) * (weights_left_.size() / held_.size()) + static_cast<size_t>(action.microbatch);
    in_flight_[static_cast<size_t>(stage)] -= --weights_left_[at] == 0 ? 1 : 0;
  }

  const ActionTable& table_;
  const Segments& segments_;
  const SegmentRule rule_;
  std::vector<PlaceList> places_;
  std::vector<int32_t> held_;          ///< by stage: the most microbatches in flight
  std::vector<int32_t> in_flight_;     ///< by stage
  std::vector<int32_t> weights_left_;  ///< by stage and microbatch: segments whose B or W has not begun
};

}  // namespace

SegmentOrder orderSegments(const Schedule& stages, const Segments& segments, const SegmentRule& rule, const ScheduleCosts& costs) {
  Schedule all = allActions(shapeOfSegments(stages, segments), rule.is_split);
  all.segments = segments;
  const ActionTable table(all, edgesOf(costs));
  OpenActions open_actions(table, stages, segments, rule);
  const SimulatedSchedule played = play(table, costs, open_actions);
  const std::string name =
      stages.name + "_" + std::to_string(rule.most_open) + "_open" + (rule.is_split ? "_split" : "") + (rule.backward_first ? "_back" : "");
  return {asPlayed(name, all, played), played.makespan_s};
}

Schedule inPairs(const PipelineShape& shape) {
  PipelineShape pairs = shape;
  pairs.num_microbatches = (shape.num_microbatches + 1) / 2;
  const Schedule base = oneFOneB(pairs);
  Schedule out{"pairs", shape.num_stages, shape.num_microbatches, shape.place_of_stage, {}};
  for (int32_t place = 0; place < base.numPlaces(); ++place) {
    auto& cells = out.cells.emplace_back();
    for (const Action& action : base.actionsOf(place)) {
      for (int32_t microbatch = 2 * action.microbatch; microbatch < std::min(2 * action.microbatch + 2, shape.num_microbatches); ++microbatch) {
        cells.emplace_back(Action{action.kind, action.stage, microbatch});
      }
    }
  }
  return out;
}

Schedule duplex(const PipelineShape& shape, const Segments& segments) {
  const Schedule pairs = inPairs(shape);
  Schedule out = dividedInto(pairs, segments);
  out.name = "duplex";
  for (int32_t place = 0; place < pairs.numPlaces(); ++place) {
    auto& cells = out.cells[static_cast<size_t>(place)];
    cells.clear();
    const std::vector<Action> actions = pairs.actionsOf(place);
    for (size_t i = 0; i < actions.size();) {
      const bool is_pair = i + 1 < actions.size() && actions[i + 1].kind == actions[i].kind && actions[i + 1].stage == actions[i].stage;
      const std::vector<Action> own = segments.expand({actions[i]});
      for (const Action& action : own) {
        cells.emplace_back(action);
        if (is_pair) {
          cells.emplace_back(Action{action.kind, action.stage, action.microbatch + 1});
        }
      }
      i += is_pair ? 2 : 1;
    }
  }
  return out;
}

}  // namespace xmesh::core
