#pragma once

#include <cstdint>

#include "cuda/grid.h"

/// Copies between strided boxes, many in one launch: what the kernel is given, and what each of its threads does.
namespace xmesh::cuda {

struct CopyDim {
  int64_t extent = 0;
  int64_t src_bytes = 0;
  int64_t dst_bytes = 0;
};

/// Words [first_word, first_word + num_words) of a box, in row-major order of its dims; a word is what moves at once, 1 to 16 bytes.
struct CopyItem {
  uint64_t src = 0;  ///< address of word 0, which may lie before the memory that is touched
  uint64_t dst = 0;
  int64_t first_word = 0;
  int64_t num_words = 0;
  BlockRange blocks;
  int16_t first_dim = 0;
  int16_t num_dims = 0;
  int16_t word_bytes = 0;
  int16_t is_small = 0;  ///< see fitsIn32Bits
};

/// The parameter of one launch, by value: no more than 4 KiB fit on every device.
struct CopyLaunch {
  static constexpr int kMaxItems = 32;
  static constexpr int kMaxDims = 96;

  CopyItem items[kMaxItems];
  CopyDim dims[kMaxDims];
  int32_t num_items = 0;
  int32_t num_dims = 0;
  int32_t num_blocks = 0;
};
static_assert(sizeof(CopyLaunch) <= 4096);

/// Words that a thread reads before it writes the first of them.
inline constexpr int kWordsAtOnce = 2;

template <int kBytes, typename Index>
XMESH_HOST_DEVICE void copyWords(const CopyItem& item, const CopyDim* dims, const Stride& stride) {
  for (int64_t begin = stride.begin; begin < item.num_words; begin += kWordsAtOnce * stride.step) {
    Word<kBytes> words[kWordsAtOnce];
    uint64_t to[kWordsAtOnce];
    for (int k = 0; k < kWordsAtOnce; ++k) {
      const int64_t word = begin + k * stride.step;
      if (word < item.num_words) {
        uint64_t from = item.src;
        to[k] = item.dst;
        visitCoordinates(dims, item.num_dims, static_cast<Index>(item.first_word + word), [&](const CopyDim& dim, int64_t coordinate) {
          from += static_cast<uint64_t>(coordinate * dim.src_bytes);
          to[k] += static_cast<uint64_t>(coordinate * dim.dst_bytes);
        });
        words[k] = loadWord<kBytes>(from);
      }
    }
    for (int k = 0; k < kWordsAtOnce; ++k) {
      if (begin + k * stride.step < item.num_words) {
        storeWord<kBytes>(to[k], words[k]);
      }
    }
  }
}

template <int kBytes>
XMESH_HOST_DEVICE void copyWordsOf(const CopyItem& item, const CopyDim* dims, const Stride& stride) {
  if (item.is_small != 0) {
    copyWords<kBytes, uint32_t>(item, dims, stride);
  } else {
    copyWords<kBytes, uint64_t>(item, dims, stride);
  }
}

/// The whole of one thread.
XMESH_HOST_DEVICE inline void runCopy(const CopyLaunch& launch, const ThreadIndex& at) {
  const CopyItem& item = itemOf(launch.items, at);
  const CopyDim* dims = launch.dims + item.first_dim;
  const Stride stride = strideOf(item.blocks, at);
  switch (item.word_bytes) {
    case 1:
      return copyWordsOf<1>(item, dims, stride);
    case 2:
      return copyWordsOf<2>(item, dims, stride);
    case 4:
      return copyWordsOf<4>(item, dims, stride);
    case 8:
      return copyWordsOf<8>(item, dims, stride);
    default:
      return copyWordsOf<16>(item, dims, stride);
  }
}

}  // namespace xmesh::cuda
