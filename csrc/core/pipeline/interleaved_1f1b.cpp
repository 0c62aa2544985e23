#include <algorithm>

#include "core/pipeline/generators.h"

namespace xmesh::core {
namespace {

/// The actions of one place and kind in order: round by round, inside a round stage by stage, inside a stage microbatch by microbatch.
std::vector<Action> passOf(ActionKind kind, const std::vector<int32_t>& stages, const std::vector<int32_t>& round_sizes) {
  std::vector<Action> out;
  int32_t first = 0;
  for (int32_t size : round_sizes) {
    for (int32_t stage : stages) {
      for (int32_t i = 0; i < size; ++i) {
        out.push_back(Action{kind, stage, first + i});
      }
    }
    first += size;
  }
  return out;
}

std::vector<int32_t> roundSizes(const PipelineShape& shape) {
  const int32_t num_rounds = std::max(1, shape.num_microbatches / shape.numPlaces());
  std::vector<int32_t> sizes(static_cast<size_t>(num_rounds), shape.num_microbatches / num_rounds);
  for (int32_t i = 0; i < shape.num_microbatches % num_rounds; ++i) {
    ++sizes[static_cast<size_t>(i)];
  }
  return sizes;
}

bool isCyclic(const PipelineShape& shape) {
  for (int32_t stage = 0; stage < shape.num_stages; ++stage) {
    if (shape.place_of_stage[static_cast<size_t>(stage)] != stage % shape.numPlaces()) {
      return false;
    }
  }
  return shape.num_stages % shape.numPlaces() == 0;
}

Schedule cyclic(const PipelineShape& shape, const std::vector<int32_t>& round_sizes) {
  const int32_t num_places = shape.numPlaces();
  Schedule schedule{"interleaved_1f1b", shape.num_stages, shape.num_microbatches, shape.place_of_stage, {}};
  schedule.cells.resize(static_cast<size_t>(num_places));
  const int64_t stages_per_place = shape.num_stages / num_places;
  for (int32_t place = 0; place < num_places; ++place) {
    std::vector<int32_t> stages = schedule.stagesOf(place);
    const std::vector<Action> forwards = passOf(ActionKind::kForward, stages, round_sizes);
    std::reverse(stages.begin(), stages.end());
    const std::vector<Action> backwards = passOf(ActionKind::kBackward, stages, round_sizes);
    const auto warm_up = static_cast<size_t>(
        std::min<int64_t>((stages_per_place - 1) * round_sizes[0] + 2 * (num_places - 1 - place), static_cast<int64_t>(forwards.size())));
    auto& cells = schedule.cells[static_cast<size_t>(place)];
    cells.assign(forwards.begin(), forwards.begin() + static_cast<ptrdiff_t>(warm_up));
    for (size_t i = 0; i < backwards.size(); ++i) {
      if (warm_up + i < forwards.size()) {
        cells.push_back(forwards[warm_up + i]);
      }
      cells.push_back(backwards[i]);
    }
  }
  return schedule;
}

}  // namespace

Schedule interleavedOneFOneB(const PipelineShape& shape) {
  const std::vector<int32_t> round_sizes = roundSizes(shape);
  if (isCyclic(shape)) {
    return cyclic(shape, round_sizes);
  }
  ReadyRule rule{depths(shape), {}};
  for (int32_t& count : rule.most_in_flight) {
    count = 2 * count - 1;
  }
  for (size_t round = 0; round < round_sizes.size(); ++round) {
    rule.round_of_microbatch.insert(rule.round_of_microbatch.end(), static_cast<size_t>(round_sizes[round]), static_cast<int32_t>(round));
  }
  return asReady("interleaved_1f1b", shape, rule);
}

}  // namespace xmesh::core
