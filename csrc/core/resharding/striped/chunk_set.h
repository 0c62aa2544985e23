#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace xmesh::core {

/// A set of chunks, in words of 64; a summary tells which words are not empty.
class ChunkSet {
 public:
  explicit ChunkSet(size_t num_chunks = 0) : words_((num_chunks + 63) / 64, 0), summary_((words_.size() + 63) / 64, 0) {}
  void insert(int32_t chunk) {
    const size_t i = static_cast<size_t>(chunk) / 64;
    words_[i] |= uint64_t{1} << (chunk % 64);
    summary_[i / 64] |= uint64_t{1} << (i % 64);
  }
  void erase(int32_t chunk) {
    const size_t i = static_cast<size_t>(chunk) / 64;
    words_[i] &= ~(uint64_t{1} << (chunk % 64));
    if (words_[i] == 0) {
      summary_[i / 64] &= ~(uint64_t{1} << (i % 64));
    }
  }
  bool contains(int32_t chunk) const { return (words_[static_cast<size_t>(chunk) / 64] >> (chunk % 64) & 1) != 0; }
  uint64_t word(size_t i) const { return words_[i]; }
  /// Bit k of word i: whether word 64 i + k has any chunk.
  size_t numSummaryWords() const { return summary_.size(); }
  uint64_t summaryWord(size_t i) const { return summary_[i]; }

 private:
  std::vector<uint64_t> words_;
  std::vector<uint64_t> summary_;
};

}  // namespace xmesh::core
