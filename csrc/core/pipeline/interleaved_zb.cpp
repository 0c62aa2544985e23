#include <algorithm>

#include "core/pipeline/generators.h"
#include "core/pipeline/split_order.h"

namespace xmesh::core {

Schedule interleavedZeroBubble(const PipelineShape& shape) {
  const Schedule whole = interleavedOneFOneB(shape);
  std::vector<int32_t> most = peakInFlight(whole);
  const int32_t largest = *std::max_element(most.begin(), most.end());
  std::fill(most.begin(), most.end(), largest);
  return splitInWaits("interleaved_zb", whole, most, unitCosts(shape, 0));
}

}  // namespace xmesh::core
