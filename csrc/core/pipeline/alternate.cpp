#include <algorithm>

#include "core/error.h"
#include "core/pipeline/generators.h"

namespace xmesh::core {

Schedule alternate(const std::string& name, const PipelineShape& shape, const std::vector<int32_t>& peak_in_flight) {
  Schedule schedule{name, shape.num_stages, shape.num_microbatches, shape.place_of_stage, {}};
  schedule.cells.resize(static_cast<size_t>(shape.numPlaces()));
  for (int32_t stage = 0; stage < shape.num_stages; ++stage) {
    const int32_t place = shape.place_of_stage[static_cast<size_t>(stage)];
    auto& cells = schedule.cells[static_cast<size_t>(place)];
    require(cells.empty(), "schedule '" + name + "' is made for one stage per place, got stages " + std::to_string(schedule.stagesOf(place)[0]) +
                               " and " + std::to_string(stage) + " on place " + std::to_string(place) +
                               "; 'gpipe' takes any places, 'interleaved_1f1b' takes stage s on place s mod (number of places)");
    const int32_t warm_up = std::min(shape.num_microbatches, peak_in_flight[static_cast<size_t>(stage)]);
    for (int32_t microbatch = 0; microbatch < warm_up; ++microbatch) {
      cells.push_back(Action{ActionKind::kForward, stage, microbatch});
    }
    for (int32_t microbatch = 0; microbatch < shape.num_microbatches; ++microbatch) {
      cells.push_back(Action{ActionKind::kBackward, stage, microbatch});
      if (warm_up + microbatch < shape.num_microbatches) {
        cells.push_back(Action{ActionKind::kForward, stage, warm_up + microbatch});
      }
    }
  }
  return schedule;
}

}  // namespace xmesh::core
