#include <algorithm>
#include <bit>
#include <memory>

#include "cuda/launches.h"
#include "runtime/memory/copy_dims.h"

namespace xmesh::cuda {
namespace {

using runtime::CopyDims;

constexpr int64_t kMaxWordBytes = 16;
constexpr int64_t kMaxBlocksPerItem = 8192;

/// Bytes [first_byte, first_byte + num_bytes) of rows of `row_bytes`, counted in row-major order. Each row is one run in memory on both sides.
struct Rows {
  uint64_t src = 0;  ///< address of byte 0
  uint64_t dst = 0;
  int64_t row_bytes = 0;
  size_t num_dims = 0;  ///< the first of the dims: which row
  int64_t first_byte = 0;
  int64_t num_bytes = 0;
};

Rows rowsOf(const CopyDims& dims, const std::byte* src, const std::byte* dst, int64_t begin, int64_t end, int64_t item_bytes) {
  Rows rows;
  rows.src = reinterpret_cast<uint64_t>(src) + static_cast<uint64_t>(dims.src_offset);
  rows.dst = reinterpret_cast<uint64_t>(dst) + static_cast<uint64_t>(dims.dst_offset);
  rows.row_bytes = item_bytes;
  rows.num_dims = dims.num_dims;
  rows.first_byte = begin * item_bytes;
  rows.num_bytes = (end - begin) * item_bytes;
  const size_t inner = dims.num_dims - 1;
  if (dims.src_bytes[inner] == item_bytes && dims.dst_bytes[inner] == item_bytes) {
    rows.row_bytes = dims.extents[inner] * item_bytes;
    rows.num_dims = inner;
  }
  if (rows.num_dims == 0) {  // a single row, which may as well begin at the first byte; its length matters to nothing
    rows.src += static_cast<uint64_t>(rows.first_byte);
    rows.dst += static_cast<uint64_t>(rows.first_byte);
    rows.first_byte = 0;
    rows.row_bytes = 0;
  }
  return rows;
}

/// The longest word that all of it consists of, on either side; `limit` at most.
int64_t wordBytes(const Rows& rows, const CopyDims& dims, int64_t limit) {
  uint64_t bits = rows.src | rows.dst | static_cast<uint64_t>(rows.row_bytes | rows.first_byte | limit);
  for (size_t d = 0; d < rows.num_dims; ++d) {
    bits |= static_cast<uint64_t>(dims.src_bytes[d] | dims.dst_bytes[d]);
  }
  return int64_t{1} << std::countr_zero(bits);
}

class CopyLaunches {
 public:
  explicit CopyLaunches(const LaunchCopy& launch) : launch_(launch) {}

  /// Elements [begin, end) of `dims`, whose offsets count from `src` and `dst`.
  void add(const CopyDims& dims, const std::byte* src, const std::byte* dst, int64_t begin, int64_t end, int64_t item_bytes) {
    if (begin < end) {
      add(rowsOf(dims, src, dst, begin, end, item_bytes), dims, kMaxWordBytes, item_bytes);
    }
  }

  void flush() {
    if (next_->num_items > 0) {
      launch_(*next_);
      *next_ = {};
    }
  }

 private:
  /// What is left of the last word is a second item.
  void add(Rows rows, const CopyDims& dims, int64_t limit, int64_t item_bytes) {
    const int64_t word = wordBytes(rows, dims, limit);
    const int64_t rest = rows.num_bytes % word;
    rows.num_bytes -= rest;
    if (rows.num_bytes > 0) {
      addWords(rows, dims, word);
    }
    if (rest > 0) {
      rows.first_byte += rows.num_bytes;
      rows.num_bytes = rest;
      add(rows, dims, item_bytes, item_bytes);
    }
  }

  void addWords(const Rows& rows, const CopyDims& dims, int64_t word) {
    if (next_->num_items == CopyLaunch::kMaxItems || next_->num_dims + static_cast<int32_t>(rows.num_dims) + 1 > CopyLaunch::kMaxDims) {
      flush();
    }
    CopyItem& item = next_->items[next_->num_items++];
    item.src = rows.src;
    item.dst = rows.dst;
    item.first_word = rows.first_byte / word;
    item.num_words = rows.num_bytes / word;
    item.first_dim = static_cast<int16_t>(next_->num_dims);
    for (size_t d = 0; d < rows.num_dims; ++d) {
      next_->dims[next_->num_dims++] = {dims.extents[d], dims.src_bytes[d], dims.dst_bytes[d]};
    }
    if (rows.num_dims == 0 || rows.row_bytes > word) {
      next_->dims[next_->num_dims++] = {rows.row_bytes / word, word, word};
    }
    item.num_dims = static_cast<int16_t>(next_->num_dims - item.first_dim);
    item.word_bytes = static_cast<int16_t>(word);
    item.is_small = fitsIn32Bits(next_->dims + item.first_dim, item.num_dims, item.first_word + item.num_words) ? 1 : 0;
    const int64_t words_per_block = int64_t{kThreadsPerBlock} * kWordsAtOnce;
    const int64_t num_blocks = std::min((item.num_words + words_per_block - 1) / words_per_block, kMaxBlocksPerItem);
    item.blocks = {next_->num_blocks, static_cast<int32_t>(num_blocks)};
    next_->num_blocks += item.blocks.count;
  }

  const LaunchCopy& launch_;
  const std::unique_ptr<CopyLaunch> next_ = std::make_unique<CopyLaunch>();
};

}  // namespace

void packInLaunches(std::span<const runtime::PackedRange> ranges, const LaunchCopy& launch) {
  CopyLaunches launches(launch);
  for (const runtime::PackedRange& range : ranges) {
    launches.add(packDims(range.box, range.begin, range.item_bytes), range.box.base, range.dense, range.begin, range.end, range.item_bytes);
  }
  launches.flush();
}

void unpackInLaunches(std::span<const runtime::PackedRange> ranges, const LaunchCopy& launch) {
  CopyLaunches launches(launch);
  for (const runtime::PackedRange& range : ranges) {
    launches.add(unpackDims(range.box, range.begin, range.item_bytes), range.dense, range.box.base, range.begin, range.end, range.item_bytes);
  }
  launches.flush();
}

void copyInLaunches(std::span<const runtime::BoxPair> pairs, const LaunchCopy& launch) {
  CopyLaunches launches(launch);
  for (const runtime::BoxPair& pair : pairs) {
    if (pair.num_elements > 0) {
      launches.add(commonDims(pair.src, pair.dst), pair.src.base, pair.dst.base, 0, pair.num_elements, pair.item_bytes);
    }
  }
  launches.flush();
}

}  // namespace xmesh::cuda
