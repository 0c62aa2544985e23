#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "runtime/memory/box_copy.h"

namespace xmesh::runtime {

/// The dims of a copy: source and destination share extents, each has its strides. Elements are counted in row-major order. Plain value.
struct CopyDims {
  size_t num_dims = 0;
  int64_t src_offset = 0;  ///< where element 0 is, in bytes; may lie before the memory that is touched, hence no pointer
  int64_t dst_offset = 0;
  std::array<int64_t, kMaxDims * 2> extents{};
  std::array<int64_t, kMaxDims * 2> src_bytes{};
  std::array<int64_t, kMaxDims * 2> dst_bytes{};
};

/// From a box to dense memory that holds its element `begin` first.
CopyDims packDims(const StridedBox& src, int64_t begin, int64_t item_bytes);
/// The reverse of packDims.
CopyDims unpackDims(const StridedBox& dst, int64_t begin, int64_t item_bytes);
/// The common refinement of two boxes whose dims were merged differently, merged again where both allow it.
CopyDims commonDims(const StridedBox& src, const StridedBox& dst);

}  // namespace xmesh::runtime
