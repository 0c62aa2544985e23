#include "core/pipeline/generators.h"

namespace xmesh::core {

Schedule loopedBfs(const PipelineShape& shape) {
  Schedule schedule{"looped_bfs", shape.num_stages, shape.num_microbatches, shape.place_of_stage, {}};
  schedule.cells.resize(static_cast<size_t>(shape.numPlaces()));
  const auto append = [&](ActionKind kind, int32_t stage, int32_t microbatch) {
    schedule.cells[static_cast<size_t>(shape.place_of_stage[static_cast<size_t>(stage)])].emplace_back(Action{kind, stage, microbatch});
  };
  for (int32_t stage = 0; stage < shape.num_stages; ++stage) {
    for (int32_t microbatch = 0; microbatch < shape.num_microbatches; ++microbatch) {
      append(ActionKind::kForward, stage, microbatch);
    }
  }
  for (int32_t stage = shape.num_stages - 1; stage >= 0; --stage) {
    for (int32_t microbatch = shape.num_microbatches - 1; microbatch >= 0; --microbatch) {
      append(ActionKind::kBackward, stage, microbatch);
    }
  }
  return schedule;
}

}  // namespace xmesh::core
