#include "core/pipeline/generators.h"

namespace xmesh::core {

Schedule eagerOneFOneB(const PipelineShape& shape) {
  std::vector<int32_t> peak;
  for (int32_t stage = 0; stage < shape.num_stages; ++stage) {
    peak.push_back(2 * (shape.num_stages - stage) - 1);
  }
  return alternate("eager_1f1b", shape, peak);
}

}  // namespace xmesh::core
