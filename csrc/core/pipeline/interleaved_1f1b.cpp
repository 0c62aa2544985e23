#include <algorithm>

#include "core/error.h"
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

}  // namespace

Schedule interleavedOneFOneB(const PipelineShape& shape) {
  const int32_t num_places = shape.numPlaces();
  for (int32_t stage = 0; stage < shape.num_stages; ++stage) {
    const int32_t place = shape.place_of_stage[static_cast<size_t>(stage)];
    require(place == stage % num_places && shape.num_stages % num_places == 0,
            "schedule 'interleaved_1f1b' puts equally many stages on each place, stage s on place s mod " + std::to_string(num_places) + ", got " +
                std::to_string(shape.num_stages) + " stages with stage " + std::to_string(stage) + " on place " + std::to_string(place));
  }
  const int32_t num_rounds = std::max(1, shape.num_microbatches / num_places);
  std::vector<int32_t> round_sizes(static_cast<size_t>(num_rounds), shape.num_microbatches / num_rounds);
  for (int32_t i = 0; i < shape.num_microbatches % num_rounds; ++i) {
    ++round_sizes[static_cast<size_t>(i)];
  }
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

}  // namespace xmesh::core
