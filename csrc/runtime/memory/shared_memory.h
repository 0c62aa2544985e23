#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/memory/box_copy.h"

namespace xmesh::runtime {

/// The memory of a tensor that a call reads or writes. Plain value.
struct TensorMemory {
  LocalTensor tensor;
  int64_t item_bytes = 0;
  int64_t device = 0;  ///< addresses of different devices are not compared
  bool is_written = false;
};

/// Whether two elements of a tensor lie in the same memory: an expanded dim, windows that overlap. May say yes, where strides are so odd that
/// kMostOverlapSteps do not tell.
bool overlapsItself(const LocalTensor& tensor);
/// Whether a byte is in both; blocks of columns of one matrix share none. May say yes as overlapsItself().
bool overlap(const TensorMemory& one, const TensorMemory& other);
/// Two of these, by index, that share memory and of which one is written, or one that is written and shares some with itself; nothing where there
/// are none.
std::optional<std::pair<size_t, size_t>> findSharedMemory(const std::vector<TensorMemory>& tensors);

inline constexpr int64_t kMostOverlapSteps = 100'000;

}  // namespace xmesh::runtime
