#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "random_layouts.h"
#include "runtime/reshard_case.h"

/// Random boxes in tensors of any strides, for tests of what copies them.
namespace xmesh::boxes {

using layouts::randomInt;
using replay::MemoryLayout;
using replay::OwnedTensor;

struct BoxInTensor {
  std::vector<int64_t> offsets;
  std::vector<int64_t> extents;
  int64_t numElements() const { return layouts::product(extents); }
};

inline BoxInTensor randomBox(std::mt19937_64& rng, const std::vector<int64_t>& shape) {
  BoxInTensor box;
  for (int64_t extent : shape) {
    box.offsets.push_back(randomInt(rng, 0, extent - 1));
    box.extents.push_back(randomInt(rng, 1, extent - box.offsets.back()));
  }
  return box;
}

/// Row-major number in the tensor of the box's i-th element.
inline int64_t elementOf(const BoxInTensor& box, const std::vector<int64_t>& shape, int64_t i) {
  int64_t out = 0;
  int64_t scale = 1;
  for (size_t dim = shape.size(); dim-- > 0;) {
    out += (box.offsets[dim] + i % box.extents[dim]) * scale;
    i /= box.extents[dim];
    scale *= shape[dim];
  }
  return out;
}

inline std::vector<int64_t> randomShape(std::mt19937_64& rng) {
  std::vector<int64_t> shape(static_cast<size_t>(randomInt(rng, 0, 8)));
  int64_t left = 4000;
  for (int64_t& extent : shape) {
    extent = randomInt(rng, 1, std::min<int64_t>(left, 12));
    left = std::max<int64_t>(1, left / extent);
  }
  return shape;
}

inline void fill(OwnedTensor& tensor, int64_t num_elements, int64_t item_bytes, uint64_t seed) {
  for (int64_t i = 0; i < num_elements * item_bytes; ++i) {
    tensor.at(i / item_bytes)[i % item_bytes] = static_cast<uint8_t>(replay::mix(static_cast<uint64_t>(i) + seed));
  }
}

inline constexpr int64_t kItemBytes[] = {1, 2, 4, 8, 16};

inline runtime::StridedBox stridedBox(const OwnedTensor& tensor, const BoxInTensor& box, int64_t item_bytes) {
  return runtime::stridedBox(tensor.tensor(), box.offsets.data(), box.extents.data(), item_bytes);
}

}  // namespace xmesh::boxes
