#include "core/pipeline/generators.h"

namespace xmesh::core {
namespace {

/// Plays the pipeline, every action one unit of time, and writes down what each place does. A stage's forwards and its backwards go by microbatch.
class Play {
 public:
  Play(const PipelineShape& shape, const ReadyRule& rule)
      : shape_(shape),
        rule_(rule),
        forwards_(static_cast<size_t>(shape.num_stages), 0),
        backwards_(forwards_),
        stages_of_(static_cast<size_t>(shape.numPlaces())),
        cells_(stages_of_.size()) {
    for (int32_t stage = 0; stage < shape.num_stages; ++stage) {
      stages_of_[static_cast<size_t>(shape.place_of_stage[static_cast<size_t>(stage)])].push_back(stage);
    }
  }

  std::vector<std::vector<std::optional<Action>>> run() {
    while (backwards_.front() < shape_.num_microbatches) {
      std::vector<Action> now;
      for (size_t place = 0; place < stages_of_.size(); ++place) {
        if (const std::optional<Action> action = next(stages_of_[place])) {
          cells_[place].push_back(action);
          now.push_back(*action);
        }
      }
      for (const Action& action : now) {
        ++(action.kind == ActionKind::kForward ? forwards_ : backwards_)[static_cast<size_t>(action.stage)];
      }
    }
    return std::move(cells_);
  }

 private:
  /// The best of what is ready on a place. The oldest microbatch that is not done can always go on, since no newer one has been where it is missing:
  /// so some place has one.
  std::optional<Action> next(const std::vector<int32_t>& stages) const {
    std::optional<Action> backward;
    std::optional<Action> forward;
    for (int32_t stage : stages) {
      if (canBackward(stage)) {
        const Action action{ActionKind::kBackward, stage, backwards_[static_cast<size_t>(stage)]};
        backward = backward && round(*backward) < round(action) ? backward : action;
      }
      if (canForward(stage)) {
        const Action action{ActionKind::kForward, stage, forwards_[static_cast<size_t>(stage)]};
        forward = forward && goesBefore(*forward, action) ? forward : action;
      }
    }
    return backward ? backward : forward;
  }

  int32_t round(const Action& action) const {
    return rule_.round_of_microbatch.empty() ? 0 : rule_.round_of_microbatch[static_cast<size_t>(action.microbatch)];
  }
  /// Whether a forward goes before one of a later stage.
  bool goesBefore(const Action& one, const Action& later) const { return !rule_.round_of_microbatch.empty() && round(one) <= round(later); }

  bool canForward(int32_t stage) const {
    const auto s = static_cast<size_t>(stage);
    const int32_t microbatch = forwards_[s];
    return microbatch < shape_.num_microbatches && microbatch - backwards_[s] < rule_.most_in_flight[s] &&
           (stage == 0 || microbatch < forwards_[s - 1]);
  }

  bool canBackward(int32_t stage) const {
    const auto s = static_cast<size_t>(stage);
    return backwards_[s] < forwards_[s] && (stage + 1 == shape_.num_stages || backwards_[s] < backwards_[s + 1]);
  }

  const PipelineShape& shape_;
  const ReadyRule& rule_;
  std::vector<int32_t> forwards_;   ///< by stage: done
  std::vector<int32_t> backwards_;  ///< by stage: done
  std::vector<std::vector<int32_t>> stages_of_;
  std::vector<std::vector<std::optional<Action>>> cells_;
};

}  // namespace

std::vector<int32_t> depths(const PipelineShape& shape) {
  std::vector<int32_t> out(static_cast<size_t>(shape.num_stages), 1);
  for (size_t stage = out.size() - 1; stage > 0; --stage) {
    out[stage - 1] = out[stage] + (shape.place_of_stage[stage - 1] == shape.place_of_stage[stage] ? 0 : 1);
  }
  return out;
}

Schedule asReady(const std::string& name, const PipelineShape& shape, const ReadyRule& rule) {
  return {name, shape.num_stages, shape.num_microbatches, shape.place_of_stage, Play(shape, rule).run()};
}

}  // namespace xmesh::core
