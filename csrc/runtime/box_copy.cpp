#include "runtime/box_copy.h"

#include <algorithm>
#include <cstring>

namespace xmesh::runtime {
namespace {

/// The dims of a copy: source and destination share extents, each has its strides.
struct CopyDims {
  size_t num_dims = 0;
  int64_t src_offset = 0;  ///< of element 0 in bytes; may lie before the memory that is touched, hence no pointer
  int64_t dst_offset = 0;
  std::array<int64_t, kMaxDims * 2> extents{};
  std::array<int64_t, kMaxDims * 2> src_bytes{};
  std::array<int64_t, kMaxDims * 2> dst_bytes{};
};

/// Rows of `count` items each, `num_rows` of them.
struct Plane {
  int64_t num_rows = 1;
  int64_t count = 0;
  int64_t src_row_bytes = 0;
  int64_t dst_row_bytes = 0;
  int64_t src_item_bytes = 0;
  int64_t dst_item_bytes = 0;
};

template <size_t kBytes>
void copyDenseRows(const std::byte* src, std::byte* dst, const Plane& plane) {
  for (int64_t row = 0; row < plane.num_rows; ++row) {
    std::memcpy(dst + row * plane.dst_row_bytes, src + row * plane.src_row_bytes, kBytes);
  }
}

void copyDense(const std::byte* src, std::byte* dst, const Plane& plane, int64_t run_bytes) {
  switch (run_bytes) {
    case 1:
      return copyDenseRows<1>(src, dst, plane);
    case 2:
      return copyDenseRows<2>(src, dst, plane);
    case 4:
      return copyDenseRows<4>(src, dst, plane);
    case 8:
      return copyDenseRows<8>(src, dst, plane);
    case 16:
      return copyDenseRows<16>(src, dst, plane);
    case 32:
      return copyDenseRows<32>(src, dst, plane);
    case 64:
      return copyDenseRows<64>(src, dst, plane);
    default:
      for (int64_t row = 0; row < plane.num_rows; ++row) {
        std::memcpy(dst + row * plane.dst_row_bytes, src + row * plane.src_row_bytes, static_cast<size_t>(run_bytes));
      }
  }
}

/// Items one by one, in square blocks so that a transposition touches each cache line of either side few times.
template <size_t kBytes>
void copyItems(const std::byte* src, std::byte* dst, const Plane& plane) {
  constexpr int64_t kBlock = 32;
  for (int64_t row_block = 0; row_block < plane.num_rows; row_block += kBlock) {
    const int64_t row_end = std::min(plane.num_rows, row_block + kBlock);
    for (int64_t block = 0; block < plane.count; block += kBlock) {
      const int64_t end = std::min(plane.count, block + kBlock);
      for (int64_t row = row_block; row < row_end; ++row) {
        for (int64_t i = block; i < end; ++i) {
          std::memcpy(dst + row * plane.dst_row_bytes + i * plane.dst_item_bytes, src + row * plane.src_row_bytes + i * plane.src_item_bytes, kBytes);
        }
      }
    }
  }
}

void copyPlane(const std::byte* src, std::byte* dst, const Plane& plane, int64_t item_bytes) {
  if (plane.src_item_bytes == item_bytes && plane.dst_item_bytes == item_bytes) {
    return copyDense(src, dst, plane, plane.count * item_bytes);
  }
  switch (item_bytes) {
    case 1:
      return copyItems<1>(src, dst, plane);
    case 2:
      return copyItems<2>(src, dst, plane);
    case 4:
      return copyItems<4>(src, dst, plane);
    case 8:
      return copyItems<8>(src, dst, plane);
    default:
      return copyItems<16>(src, dst, plane);
  }
}

/// Elements [begin, end) in row-major order of `dims`: a part of a row, then as many whole rows at once as the second innermost dim has, ...
void copyElements(const std::byte* src, std::byte* dst, const CopyDims& dims, int64_t item_bytes, int64_t begin, int64_t end) {
  const size_t inner = dims.num_dims - 1;
  const int64_t row_length = dims.extents[inner];
  std::array<int64_t, kMaxDims * 2> coord{};
  int64_t src_offset = dims.src_offset;  // of the row at coord
  int64_t dst_offset = dims.dst_offset;
  int64_t rest = begin / row_length;
  for (size_t dim = inner; dim-- > 0;) {
    coord[dim] = rest % dims.extents[dim];
    rest /= dims.extents[dim];
    src_offset += coord[dim] * dims.src_bytes[dim];
    dst_offset += coord[dim] * dims.dst_bytes[dim];
  }
  int64_t column = begin % row_length;
  while (begin < end) {
    Plane plane;
    plane.src_item_bytes = dims.src_bytes[inner];
    plane.dst_item_bytes = dims.dst_bytes[inner];
    plane.count = std::min(row_length - column, end - begin);
    if (plane.count == row_length && inner > 0) {
      plane.num_rows = std::min((end - begin) / row_length, dims.extents[inner - 1] - coord[inner - 1]);
      plane.src_row_bytes = dims.src_bytes[inner - 1];
      plane.dst_row_bytes = dims.dst_bytes[inner - 1];
    }
    copyPlane(src + (src_offset + column * plane.src_item_bytes), dst + (dst_offset + column * plane.dst_item_bytes), plane, item_bytes);
    begin += plane.num_rows * plane.count;
    column = 0;
    int64_t steps = plane.num_rows;
    for (size_t dim = inner; dim-- > 0 && steps > 0;) {
      coord[dim] += steps;
      src_offset += steps * dims.src_bytes[dim];
      dst_offset += steps * dims.dst_bytes[dim];
      steps = 0;
      if (coord[dim] == dims.extents[dim]) {
        src_offset -= coord[dim] * dims.src_bytes[dim];
        dst_offset -= coord[dim] * dims.dst_bytes[dim];
        coord[dim] = 0;
        steps = 1;
      }
    }
  }
}

/// The common refinement of two boxes whose dims were merged differently, merged again where both allow it.
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

/// Row-major strides of `extents`.
void setDense(const CopyDims& dims, int64_t item_bytes, std::array<int64_t, kMaxDims * 2>& strides) {
  int64_t stride = item_bytes;
  for (size_t dim = dims.num_dims; dim-- > 0;) {
    strides[dim] = stride;
    stride *= dims.extents[dim];
  }
}

}  // namespace

int64_t StridedBox::numElements() const {
  int64_t count = 1;
  for (size_t dim = 0; dim < num_dims; ++dim) {
    count *= extents[dim];
  }
  return count;
}

StridedBox stridedBox(const LocalTensor& tensor, const int64_t* offsets, const int64_t* extents, int64_t item_bytes) {
  StridedBox box;
  box.base = static_cast<std::byte*>(tensor.data);
  for (size_t dim = 0; dim < tensor.shape.size(); ++dim) {
    const int64_t stride = tensor.strides[dim] * item_bytes;
    box.offset_bytes += offsets[dim] * stride;
    if (extents[dim] == 1) {
      continue;
    }
    const size_t last = box.num_dims;
    if (last > 0 && box.stride_bytes[last - 1] == stride * extents[dim]) {
      box.extents[last - 1] *= extents[dim];
      box.stride_bytes[last - 1] = stride;
    } else {
      box.extents[last] = extents[dim];
      box.stride_bytes[last] = stride;
      ++box.num_dims;
    }
  }
  if (box.num_dims == 0) {  // one element
    box.num_dims = 1;
    box.extents[0] = 1;
    box.stride_bytes[0] = item_bytes;
  }
  return box;
}

std::byte* contiguousRun(const StridedBox& box, int64_t begin, int64_t end, int64_t item_bytes) {
  const size_t inner = box.num_dims - 1;
  const int64_t row_length = box.extents[inner];
  const bool is_one = end - begin <= 1;
  if (!is_one && (box.stride_bytes[inner] != item_bytes || begin / row_length != (end - 1) / row_length)) {
    return nullptr;
  }
  int64_t offset = box.offset_bytes + begin % row_length * box.stride_bytes[inner];
  int64_t row = begin / row_length;
  for (size_t dim = inner; dim-- > 0;) {
    offset += row % box.extents[dim] * box.stride_bytes[dim];
    row /= box.extents[dim];
  }
  return box.base + offset;
}

void packRange(const StridedBox& src, int64_t begin, int64_t end, int64_t item_bytes, void* dst) {
  if (begin >= end) {
    return;
  }
  CopyDims dims;
  dims.num_dims = src.num_dims;
  dims.src_offset = src.offset_bytes;
  dims.dst_offset = -begin * item_bytes;
  std::copy_n(src.extents.begin(), src.num_dims, dims.extents.begin());
  std::copy_n(src.stride_bytes.begin(), src.num_dims, dims.src_bytes.begin());
  setDense(dims, item_bytes, dims.dst_bytes);
  copyElements(src.base, static_cast<std::byte*>(dst), dims, item_bytes, begin, end);
}

void unpackRange(const void* src, const StridedBox& dst, int64_t begin, int64_t end, int64_t item_bytes) {
  if (begin >= end) {
    return;
  }
  CopyDims dims;
  dims.num_dims = dst.num_dims;
  dims.src_offset = -begin * item_bytes;
  dims.dst_offset = dst.offset_bytes;
  std::copy_n(dst.extents.begin(), dst.num_dims, dims.extents.begin());
  std::copy_n(dst.stride_bytes.begin(), dst.num_dims, dims.dst_bytes.begin());
  setDense(dims, item_bytes, dims.src_bytes);
  copyElements(static_cast<const std::byte*>(src), dst.base, dims, item_bytes, begin, end);
}

void copyRange(const StridedBox& src, const StridedBox& dst, int64_t begin, int64_t end, int64_t item_bytes) {
  if (begin < end) {
    copyElements(src.base, dst.base, commonDims(src, dst), item_bytes, begin, end);
  }
}

}  // namespace xmesh::runtime
