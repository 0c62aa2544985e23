#include "core/pipeline/generators.h"

namespace xmesh::core {

Schedule oneFOneB(const PipelineShape& shape) {
  std::vector<int32_t> peak;
  for (int32_t stage = 0; stage < shape.num_stages; ++stage) {
    peak.push_back(shape.num_stages - stage);
  }
  return alternate("1f1b", shape, peak);
}

}  // namespace xmesh::core
