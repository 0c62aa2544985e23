#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace xmesh::runtime {

inline constexpr size_t kMaxDims = 8;

/// A rank's part of one tensor: memory owned by the caller. `data` is the first element and may be null when there is none. Strides count
/// elements and may be any that torch makes (permuted, padded, zero for a source that was expanded).
struct LocalTensor {
  void* data = nullptr;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
};

/// A box of elements in strided memory. Plain value. Element (i0, i1, ...) lies at base + offset_bytes + sum(i_d * stride_bytes[d]); elements are
/// counted in row-major order. The offset is kept apart from the pointer because it may lie before the memory that is really touched.
struct StridedBox {
  std::byte* base = nullptr;
  int64_t offset_bytes = 0;
  size_t num_dims = 0;
  std::array<int64_t, kMaxDims> extents{};
  std::array<int64_t, kMaxDims> stride_bytes{};

  int64_t numElements() const;
};

/// The box that begins at `offsets` inside `tensor` and has `extents` (arrays of the tensor's number of dims), in as few dims as possible:
/// dims of extent 1 are dropped, dims that follow one another in memory are merged.
StridedBox stridedBox(const LocalTensor& tensor, const int64_t* offsets, const int64_t* extents, int64_t item_bytes);

/// Elements one behind another, as a box.
StridedBox denseBox(std::byte* data, int64_t num_elements, int64_t item_bytes);

/// Where elements [begin, end) of the box lie when they are one run in memory in row-major order; null otherwise.
std::byte* contiguousRun(const StridedBox& box, int64_t begin, int64_t end, int64_t item_bytes);

/// Copies elements [begin, end) of `src`, in row-major order, to `dst`, which is dense and holds the element `begin` first.
void packRange(const StridedBox& src, int64_t begin, int64_t end, int64_t item_bytes, void* dst);
/// The reverse of packRange.
void unpackRange(const void* src, const StridedBox& dst, int64_t begin, int64_t end, int64_t item_bytes);
/// Copies elements [begin, end) from one box to another with the same extents before dims were merged (the same number of elements).
/// Source and destination must not overlap.
void copyRange(const StridedBox& src, const StridedBox& dst, int64_t begin, int64_t end, int64_t item_bytes);

}  // namespace xmesh::runtime
