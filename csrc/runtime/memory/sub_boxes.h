#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/memory/box_copy.h"

namespace xmesh::runtime {

namespace detail {

template <typename Visit>
void visitSubBoxes(const StridedBox& box, size_t dim, int64_t offset_bytes, int64_t begin, int64_t end, const Visit& visit) {
  int64_t row = 1;  // elements of one index of this dim
  for (size_t d = dim + 1; d < box.num_dims; ++d) {
    row *= box.extents[d];
  }
  const auto whole = [&](int64_t first, int64_t last) {
    if (first >= last) {
      return;
    }
    StridedBox part;
    part.base = box.base;
    part.offset_bytes = offset_bytes;
    part.num_dims = box.num_dims - dim;
    for (size_t d = dim; d < box.num_dims; ++d) {
      part.extents[d - dim] = box.extents[d];
      part.stride_bytes[d - dim] = box.stride_bytes[d];
    }
    if (part.num_dims > 0) {
      part.offset_bytes += first * box.stride_bytes[dim];
      part.extents[0] = last - first;
    }
    visit(part);
  };
  if (dim >= box.num_dims) {
    return whole(0, 1);
  }
  const int64_t first = begin / row;
  const int64_t last = (end - 1) / row;
  if (begin % row != 0 || (first == last && end % row != 0)) {
    const int64_t inside_end = std::min(row, end - first * row);
    visitSubBoxes(box, dim + 1, offset_bytes + first * box.stride_bytes[dim], begin - first * row, inside_end, visit);
    if (first < last) {
      visitSubBoxes(box, dim, offset_bytes, (first + 1) * row, end, visit);
    }
    return;
  }
  whole(first, end / row);
  if (end % row != 0) {
    visitSubBoxes(box, dim + 1, offset_bytes + last * box.stride_bytes[dim], 0, end - last * row, visit);
  }
}

}  // namespace detail

/// Elements [begin, end) of a box, in row-major order, as boxes: at most 2 * num_dims - 1 of them, each given to `visit(StridedBox)`.
template <typename Visit>
void forEachSubBox(const StridedBox& box, int64_t begin, int64_t end, const Visit& visit) {
  if (begin < end) {
    detail::visitSubBoxes(box, 0, box.offset_bytes, begin, end, visit);
  }
}

}  // namespace xmesh::runtime
