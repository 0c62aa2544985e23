#include <algorithm>

#include "core/pipeline/generators.h"
#include "core/pipeline/split_order.h"

namespace xmesh::core {

Schedule eagerSplit(const PipelineShape& shape) {
  const std::vector<int32_t> runs = depths(shape);
  const std::vector<int32_t> most(runs.size(), 2 * *std::max_element(runs.begin(), runs.end()));
  return splitAsReady("eager_split", shape, {most, most}, unitCosts(shape, 1));
}

}  // namespace xmesh::core
