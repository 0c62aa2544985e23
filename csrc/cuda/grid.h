#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "runtime/memory/host_device.h"

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

/// Whether 32 bits are enough for an index below `end`, and for each dim that it is divided by.
template <typename Dim>
bool fitsIn32Bits(const Dim* dims, int num_dims, int64_t end) {
  constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
  bool fits = end <= kMost;
  for (int d = 1; d < num_dims; ++d) {
    fits = fits && dims[d].extent <= kMost;
  }
  return fits;
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

/// What one instruction moves, at an address that is a multiple of its size. Addresses are numbers: those of a box's element 0 may lie before its
/// memory.
template <int kBytes>
struct alignas(kBytes) Word {
  unsigned char bytes[kBytes];
};

#ifdef __CUDA_ARCH__
/// The type that a device loads and stores by one instruction.
template <int kBytes>
struct DeviceWord;
template <>
struct DeviceWord<1> : std::type_identity<uint8_t> {};
template <>
struct DeviceWord<2> : std::type_identity<uint16_t> {};
template <>
struct DeviceWord<4> : std::type_identity<uint32_t> {};
template <>
struct DeviceWord<8> : std::type_identity<uint64_t> {};
template <>
struct DeviceWord<16> : std::type_identity<uint4> {};
#endif

namespace detail {

/// The host takes any address; a device does not.
inline void requireAligned(uint64_t address, int num_bytes) {
  if (address % static_cast<uint64_t>(num_bytes) != 0) {
    throw std::logic_error("a device would not take a word of " + std::to_string(num_bytes) + " bytes at this address");
  }
}

}  // namespace detail

template <int kBytes>
XMESH_HOST_DEVICE Word<kBytes> loadWord(uint64_t address) {
  Word<kBytes> word;
#ifdef __CUDA_ARCH__
  const auto value = *reinterpret_cast<const typename DeviceWord<kBytes>::type*>(address);
  std::memcpy(&word, &value, kBytes);
#else
  detail::requireAligned(address, kBytes);
  std::memcpy(&word, reinterpret_cast<const void*>(address), kBytes);  // NOLINT(performance-no-int-to-ptr)
#endif
  return word;
}

template <int kBytes>
XMESH_HOST_DEVICE void storeWord(uint64_t address, const Word<kBytes>& word) {
#ifdef __CUDA_ARCH__
  typename DeviceWord<kBytes>::type value;
  std::memcpy(&value, &word, kBytes);
  *reinterpret_cast<typename DeviceWord<kBytes>::type*>(address) = value;
#else
  detail::requireAligned(address, kBytes);
  std::memcpy(reinterpret_cast<void*>(address), &word, kBytes);  // NOLINT(performance-no-int-to-ptr)
#endif
}

/// A value at an address that is a multiple of kAlignment, where it may be longer than that: as few instructions as that allows.
template <int kAlignment, typename T>
XMESH_HOST_DEVICE T loadAligned(uint64_t address) {
  constexpr int kBytes = sizeof(T) < kAlignment ? sizeof(T) : kAlignment;
  Word<kBytes> words[sizeof(T) / kBytes];
  for (size_t i = 0; i < sizeof(T) / kBytes; ++i) {
    words[i] = loadWord<kBytes>(address + i * kBytes);
  }
  T value;
  std::memcpy(&value, words, sizeof(T));
  return value;
}

template <int kAlignment, typename T>
XMESH_HOST_DEVICE void storeAligned(uint64_t address, const T& value) {
  constexpr int kBytes = sizeof(T) < kAlignment ? sizeof(T) : kAlignment;
  Word<kBytes> words[sizeof(T) / kBytes];
  std::memcpy(words, &value, sizeof(T));
  for (size_t i = 0; i < sizeof(T) / kBytes; ++i) {
    storeWord(address + i * kBytes, words[i]);
  }
}

}  // namespace xmesh::cuda
