#include "runtime/memory/copy_dims.h"

#include <algorithm>

namespace xmesh::runtime {
namespace {

/// Row-major strides of `extents`.
void setDense(const CopyDims& dims, int64_t item_bytes, std::array<int64_t, kMaxDims * 2>& strides) {
  int64_t stride = item_bytes;
  for (size_t dim = dims.num_dims; dim-- > 0;) {
    strides[dim] = stride;
    stride *= dims.extents[dim];
  }
}

}  // namespace

CopyDims packDims(const StridedBox& src, int64_t begin, int64_t item_bytes) {
  CopyDims dims;
  dims.num_dims = src.num_dims;
  dims.src_offset = src.offset_bytes;
  dims.dst_offset = -begin * item_bytes;
  std::copy_n(src.extents.begin(), src.num_dims, dims.extents.begin());
  std::copy_n(src.stride_bytes.begin(), src.num_dims, dims.src_bytes.begin());
  setDense(dims, item_bytes, dims.dst_bytes);
  return dims;
}

CopyDims unpackDims(const StridedBox& dst, int64_t begin, int64_t item_bytes) {
  CopyDims dims;
  dims.num_dims = dst.num_dims;
  dims.src_offset = -begin * item_bytes;
  dims.dst_offset = dst.offset_bytes;
  std::copy_n(dst.extents.begin(), dst.num_dims, dims.extents.begin());
  std::copy_n(dst.stride_bytes.begin(), dst.num_dims, dims.dst_bytes.begin());
  setDense(dims, item_bytes, dims.src_bytes);
  return dims;
}

CopyDims commonDims(const StridedBox& src, const StridedBox& dst) {
  CopyDims out;
  out.src_offset = src.offset_bytes;
  out.dst_offset = dst.offset_bytes;
  size_t i = src.num_dims;
  size_t j = dst.num_dims;
  int64_t src_left = i > 0 ? src.extents[i - 1] : 1;
  int64_t dst_left = j > 0 ? dst.extents[j - 1] : 1;
  int64_t src_stride = i > 0 ? src.stride_bytes[i - 1] : 0;
  int64_t dst_stride = j > 0 ? dst.stride_bytes[j - 1] : 0;
  // Built innermost first, then reversed. Extents of one side divide into those of the other because both cut the same box at its dims.
  while (i > 0 && j > 0) {
    const int64_t extent = std::min(src_left, dst_left);
    const size_t last = out.num_dims;
    const bool merges =
        last > 0 && src_stride == out.src_bytes[last - 1] * out.extents[last - 1] && dst_stride == out.dst_bytes[last - 1] * out.extents[last - 1];
    if (merges) {
      out.extents[last - 1] *= extent;
    } else {
      out.extents[last] = extent;
      out.src_bytes[last] = src_stride;
      out.dst_bytes[last] = dst_stride;
      ++out.num_dims;
    }
    src_left /= extent;
    dst_left /= extent;
    src_stride *= extent;
    dst_stride *= extent;
    if (src_left == 1 && --i > 0) {
      src_left = src.extents[i - 1];
      src_stride = src.stride_bytes[i - 1];
    }
    if (dst_left == 1 && --j > 0) {
      dst_left = dst.extents[j - 1];
      dst_stride = dst.stride_bytes[j - 1];
    }
  }
  std::reverse(out.extents.begin(), out.extents.begin() + static_cast<std::ptrdiff_t>(out.num_dims));
  std::reverse(out.src_bytes.begin(), out.src_bytes.begin() + static_cast<std::ptrdiff_t>(out.num_dims));
  std::reverse(out.dst_bytes.begin(), out.dst_bytes.begin() + static_cast<std::ptrdiff_t>(out.num_dims));
  return out;
}

}  // namespace xmesh::runtime
