#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/memory/box_copy.h"
#include "runtime/memory/reduce.h"

namespace xmesh::runtime {

/// Elements [begin, end) of a box, and as many dense ones. Plain value.
struct PackedRange {
  StridedBox box;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t item_bytes = 0;
  std::byte* dense = nullptr;
};

/// Two boxes of the same elements; see copyRange. Plain value.
struct BoxPair {
  StridedBox src;
  StridedBox dst;
  int64_t num_elements = 0;
  int64_t item_bytes = 0;
};

/// Elements of one contribution: those of `box` from `begin` on. A partial sum has the accumulator's type.
struct Contribution {
  StridedBox box;
  int64_t begin = 0;
  bool is_sum = false;
};

/// Contributions that one reduction takes at once, in their order.
struct ReductionPart {
  Reduction reduction;
  int64_t num_elements = 0;
  std::byte* accumulator = nullptr;  ///< dense, aligned; parts of one call may share it, and may leave anything there unless they keep their sum
  bool goes_on = false;              ///< the accumulator holds the sum of those before
  std::vector<Contribution> contributions;
  bool ends = false;  ///< the value goes to the elements of `dst` from `dst_begin` on; else the accumulator keeps the sum
  StridedBox dst;     ///< may be where the accumulator is
  int64_t dst_begin = 0;
};

/// The local work of a StreamExecutor, to be put on `stream` (a native handle; null for the calling thread's current one, or one that runs on the
/// host). Meanings are those of box_copy.h and reduce.h. What one call is given is done in any order, or at once.
class StreamKernels {
 public:
  virtual ~StreamKernels() = default;
  virtual void pack(void* stream, std::span<const PackedRange> ranges) const = 0;
  virtual void unpack(void* stream, std::span<const PackedRange> ranges) const = 0;
  virtual void copy(void* stream, std::span<const BoxPair> pairs) const = 0;
  /// Where an accumulator is shared, only the first part may go on and only the last may keep its sum; not one each.
  virtual void reduce(void* stream, std::span<const ReductionPart> parts) const = 0;
};

/// Does the work at once, on the host.
class HostKernels final : public StreamKernels {
 public:
  void pack(void* stream, std::span<const PackedRange> ranges) const override;
  void unpack(void* stream, std::span<const PackedRange> ranges) const override;
  void copy(void* stream, std::span<const BoxPair> pairs) const override;
  void reduce(void* stream, std::span<const ReductionPart> parts) const override;
};

}  // namespace xmesh::runtime
