#include "core/pipeline/generators.h"

namespace xmesh::core {

Schedule eagerOneFOneB(const PipelineShape& shape) {
  std::vector<int32_t> most = depths(shape);
  for (int32_t& count : most) {
    count = 2 * count - 1;
  }
  return asReady("eager_1f1b", shape, {std::move(most), {}});
}

}  // namespace xmesh::core
