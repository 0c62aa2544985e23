#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace xmesh::core {

/// A set of atoms, in words of 64; a summary tells which words are not empty.
class AtomSet {
 public:
  explicit AtomSet(size_t num_atoms = 0) : words_((num_atoms + 63) / 64, 0), summary_((words_.size() + 63) / 64, 0) {}
  void insert(int32_t atom) {
    const size_t i = static_cast<size_t>(atom) / 64;
    words_[i] |= uint64_t{1} << (atom % 64);
    summary_[i / 64] |= uint64_t{1} << (i % 64);
  }
  void erase(int32_t atom) {
    const size_t i = static_cast<size_t>(atom) / 64;
    words_[i] &= ~(uint64_t{1} << (atom % 64));
    if (words_[i] == 0) {
      summary_[i / 64] &= ~(uint64_t{1} << (i % 64));
    }
  }
  bool contains(int32_t atom) const { return (words_[static_cast<size_t>(atom) / 64] >> (atom % 64) & 1) != 0; }
  uint64_t word(size_t i) const { return words_[i]; }
  /// Bit k of word i: whether word 64 i + k has any atom.
  size_t numSummaryWords() const { return summary_.size(); }
  uint64_t summaryWord(size_t i) const { return summary_[i]; }

 private:
  std::vector<uint64_t> words_;
  std::vector<uint64_t> summary_;
};

}  // namespace xmesh::core
