#include "core/pipeline/generators.h"

namespace xmesh::core {

Schedule gpipe(const PipelineShape& shape) {
  Schedule schedule{"gpipe", shape.num_stages, shape.num_microbatches, shape.place_of_stage, {}};
  schedule.cells.resize(static_cast<size_t>(shape.numPlaces()));
  const auto append = [&](ActionKind kind, int32_t stage) {
    for (int32_t microbatch = 0; microbatch < shape.num_microbatches; ++microbatch) {
      schedule.cells[static_cast<size_t>(shape.place_of_stage[static_cast<size_t>(stage)])].push_back(Action{kind, stage, microbatch});
    }
  };
  for (int32_t stage = 0; stage < shape.num_stages; ++stage) {
    append(ActionKind::kForward, stage);
  }
  for (int32_t stage = shape.num_stages - 1; stage >= 0; --stage) {
    append(ActionKind::kBackward, stage);
  }
  return schedule;
}

}  // namespace xmesh::core
