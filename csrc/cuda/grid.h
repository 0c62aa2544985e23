#pragma once

#include <cstdint>
#include <cstring>

#include "runtime/host_device.h"

/// What the bodies of all kernels share. They are functions of the host too, so that a test without a device runs them, thread by thread.
namespace xmesh::cuda {

inline constexpr int kThreadsPerBlock = 256;

/// Which thread runs: blockIdx.x, threadIdx.x, blockDim.x.
struct ThreadIndex {
  int block = 0;
  int thread = 0;
  int block_size = kThreadsPerBlock;
};

/// The blocks of one item of a launch.
struct BlockRange {
  int32_t first = 0;
  int32_t count = 1;
};

/// The item whose block a thread is in. Items have at least one block each and lie one behind another.
template <typename Item>
XMESH_HOST_DEVICE const Item& itemOf(const Item* items, const ThreadIndex& at) {
  const Item* item = items;
  while (at.block >= item->blocks.first + item->blocks.count) {
    ++item;
  }
  return *item;
}

/// A thread's numbers among those of its item: `begin`, `begin + step`, ...
struct Stride {
  int64_t begin;
  int64_t step;
};

XMESH_HOST_DEVICE inline Stride strideOf(const BlockRange& blocks, const ThreadIndex& at) {
  return {static_cast<int64_t>(at.block - blocks.first) * at.block_size + at.thread, static_cast<int64_t>(blocks.count) * at.block_size};
}

/// Calls `visit(dim, coordinate)` for the dims, which have extents, of the element that is `index`-th in row-major order.
template <typename Index, typename Dim, typename Visit>
XMESH_HOST_DEVICE void visitCoordinates(const Dim* dims, int num_dims, Index index, const Visit& visit) {
  for (int d = num_dims - 1; d > 0; --d) {
    const auto extent = static_cast<Index>(dims[d].extent);
    const Index rest = index / extent;
    visit(dims[d], static_cast<int64_t>(index - rest * extent));
    index = rest;
  }
  visit(dims[0], static_cast<int64_t>(index));
}

/// `kBytes` at an address that is a multiple of it.
template <int kBytes>
struct alignas(kBytes) Word {
  unsigned char bytes[kBytes];
};

/// A value at an address that is a multiple of kAlignment: one instruction where the value is no longer than that.
template <int kAlignment, typename T>
XMESH_HOST_DEVICE T loadAligned(uint64_t address) {
  T value;
  std::memcpy(&value, __builtin_assume_aligned(reinterpret_cast<const void*>(address), kAlignment), sizeof(T));
  return value;
}

template <int kAlignment, typename T>
XMESH_HOST_DEVICE void storeAligned(uint64_t address, const T& value) {
  std::memcpy(__builtin_assume_aligned(reinterpret_cast<void*>(address), kAlignment), &value, sizeof(T));
}

}  // namespace xmesh::cuda
