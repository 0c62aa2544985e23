#include <algorithm>

#include "core/pipeline/generators.h"
#include "core/pipeline/split_order.h"

namespace xmesh::core {
namespace {

/// Stage s and stage 2p - 1 - s on place s.
bool isV(const PipelineShape& shape) {
  const int32_t last = shape.num_stages - 1;
  for (int32_t stage = 0; stage < shape.num_stages; ++stage) {
    if (shape.place_of_stage[static_cast<size_t>(stage)] != std::min(stage, last - stage)) {
      return false;
    }
  }
  return shape.num_stages == 2 * shape.numPlaces();
}

/// One place's list: what its two stages do next is counted here.
class VList {
 public:
  VList(int32_t down, int32_t up, int32_t num_microbatches) : stages_{down, up}, num_microbatches_(num_microbatches) {}

  /// kWay: 0 on the way down (the earlier stage), 1 on the way up. Microbatches that a short batch lacks leave no action behind.
  void add(int32_t way, ActionKind kind) {
    const int32_t microbatch = next_[kindIndex(kind)][way]++;
    if (microbatch < num_microbatches_) {
      cells_.emplace_back(Action{kind, stages_[way], microbatch});
    }
  }
  int32_t done(int32_t way, ActionKind kind) const { return next_[kindIndex(kind)][way]; }
  void addBackward(int32_t way) {
    add(way, ActionKind::kBackwardInput);
    add(way, ActionKind::kBackwardWeight);
  }
  std::vector<std::optional<Action>> take() { return std::move(cells_); }

 private:
  static size_t kindIndex(ActionKind kind) { return kind == ActionKind::kForward ? 0 : kind == ActionKind::kBackwardInput ? 1 : 2; }

  int32_t stages_[2];
  int32_t num_microbatches_;
  int32_t next_[3][2] = {};  ///< by kind (F, I, W) and way
  std::vector<std::optional<Action>> cells_;
};

/// The paper's phases for place i of p.
std::vector<std::optional<Action>> phasesOf(const PipelineShape& shape, int32_t place) {
  constexpr ActionKind kF = ActionKind::kForward;
  constexpr ActionKind kI = ActionKind::kBackwardInput;
  constexpr ActionKind kW = ActionKind::kBackwardWeight;
  const int32_t num_places = shape.numPlaces();
  const int32_t count = std::max(shape.num_microbatches, 2 * num_places - 1);
  VList list(place, shape.num_stages - 1 - place, shape.num_microbatches);
  for (int32_t i = 0; i < 2 * (num_places - place) - 1; ++i) {  // until the first microbatch comes back up
    list.add(0, kF);
  }
  for (int32_t i = 0; i < place; ++i) {  // forwards both ways until the first gradient comes
    list.add(1, kF);
    list.add(0, kF);
  }
  for (int32_t i = 0; i < num_places - place; ++i) {  // backwards on the way up only
    list.add(1, kF);
    list.addBackward(1);
  }
  while (list.done(1, kF) < count) {  // in balance
    if (list.done(0, kF) < count) {
      list.add(0, kF);
    }
    list.addBackward(0);
    list.add(1, kF);
    list.addBackward(1);
  }
  for (int32_t i = 0; i < place; ++i) {  // gradients first, weights where others are awaited
    list.add(0, kI);
    list.add(1, kI);
  }
  for (int32_t i = 0; i < num_places - place; ++i) {
    list.add(0, kI);
    list.add(0, kW);
  }
  for (const int32_t way : {1, 0}) {
    while (list.done(way, kW) < count) {
      list.add(way, kW);
    }
  }
  return list.take();
}

}  // namespace

Schedule zeroBubbleV(const PipelineShape& shape) {
  if (!isV(shape)) {
    const std::vector<int32_t> runs = depths(shape);
    return splitAsReady("zb_v", shape, {runs, std::vector<int32_t>(runs.size(), runs.front())}, unitCosts(shape, 0));
  }
  Schedule out{"zb_v", shape.num_stages, shape.num_microbatches, shape.place_of_stage, {}};
  for (int32_t place = 0; place < shape.numPlaces(); ++place) {
    out.cells.push_back(phasesOf(shape, place));
  }
  return out;
}

}  // namespace xmesh::core
