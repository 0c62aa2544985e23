#include "runtime/memory/box_copy.h"

#include <algorithm>
#include <cstring>

#include "runtime/memory/copy_dims.h"

namespace xmesh::runtime {
namespace {

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
  int64_t src_offset = dims.src_offset;  // where the row at coord begins
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

StridedBox denseBox(std::byte* data, int64_t num_elements, int64_t item_bytes) {
  StridedBox box;
  box.base = data;
  box.num_dims = 1;
  box.extents[0] = num_elements;
  box.stride_bytes[0] = item_bytes;
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
  if (begin < end) {
    copyElements(src.base, static_cast<std::byte*>(dst), packDims(src, begin, item_bytes), item_bytes, begin, end);
  }
}

void unpackRange(const void* src, const StridedBox& dst, int64_t begin, int64_t end, int64_t item_bytes) {
  if (begin < end) {
    copyElements(static_cast<const std::byte*>(src), dst.base, unpackDims(dst, begin, item_bytes), item_bytes, begin, end);
  }
}

void copyRange(const StridedBox& src, const StridedBox& dst, int64_t begin, int64_t end, int64_t item_bytes) {
  if (begin < end) {
    copyElements(src.base, dst.base, commonDims(src, dst), item_bytes, begin, end);
  }
}

}  // namespace xmesh::runtime
