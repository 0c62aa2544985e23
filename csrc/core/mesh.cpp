#include "core/mesh.h"

#include <algorithm>
#include <limits>

#include "core/error.h"

namespace xmesh::core {

Mesh::Mesh(std::vector<int64_t> shape, std::vector<int64_t> ranks) : shape_(std::move(shape)), ranks_(std::move(ranks)) {
  int64_t product = 1;
  for (int64_t extent : shape_) {
    require(extent > 0, "a mesh axis must have at least one rank, got extent " + std::to_string(extent));
    require(product <= (int64_t{1} << 30) / extent, "a mesh of more than 2^30 ranks is not supported");
    product *= extent;
  }
  require(product == numRanks(), "a mesh of shape with " + std::to_string(product) + " positions was given " + std::to_string(numRanks()) + " ranks");
  std::vector<int64_t> sorted = ranks_;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    require(sorted[i] >= 0, "a mesh holds global ranks, which are not negative; got " + std::to_string(sorted[i]));
    require(sorted[i] <= std::numeric_limits<int32_t>::max(), "global rank " + std::to_string(sorted[i]) + " is out of range");
    require(i == 0 || sorted[i] != sorted[i - 1], "rank " + std::to_string(sorted[i]) + " appears twice in a mesh");
  }
}

std::vector<int64_t> Mesh::coordOfIndex(int64_t index) const {
  std::vector<int64_t> coord(shape_.size());
  for (size_t axis = shape_.size(); axis-- > 0;) {
    coord[axis] = index % shape_[axis];
    index /= shape_[axis];
  }
  return coord;
}

int64_t Mesh::indexOfRank(int64_t global_rank) const {
  const auto found = std::find(ranks_.begin(), ranks_.end(), global_rank);
  return found == ranks_.end() ? -1 : found - ranks_.begin();
}

std::string Mesh::str() const {
  std::string out;
  int64_t num_open = 0;
  for (int64_t i = 0; i < numRanks(); ++i) {
    int64_t period = 1;
    int64_t opens = 0;
    for (size_t axis = shape_.size(); axis-- > 0;) {
      period *= shape_[axis];
      opens += i % period == 0 ? 1 : 0;
    }
    if (i > 0) {
      out += std::string(static_cast<size_t>(opens), ']') + ", ";
      num_open -= opens;
    }
    out += std::string(static_cast<size_t>(opens), '[') + std::to_string(ranks_[static_cast<size_t>(i)]);
    num_open += opens;
  }
  return shape_.empty() ? "[" + out + "]" : out + std::string(static_cast<size_t>(num_open), ']');
}

}  // namespace xmesh::core
