#pragma once

#include <cstdint>

#include "runtime/box_copy.h"
#include "runtime/reduce.h"

namespace xmesh::runtime {

/// The local work of a StreamExecutor, to be put on `stream` (a native handle; null for a stream that runs on the host). Meanings are those of
/// box_copy.h and reduce.h.
class StreamKernels {
 public:
  virtual ~StreamKernels() = default;
  virtual void pack(void* stream, const StridedBox& src, int64_t begin, int64_t end, int64_t item_bytes, void* dst) const = 0;
  virtual void unpack(void* stream, const void* src, const StridedBox& dst, int64_t begin, int64_t end, int64_t item_bytes) const = 0;
  virtual void copy(void* stream, const StridedBox& src, const StridedBox& dst, int64_t num_elements, int64_t item_bytes) const = 0;
  virtual void initAccumulator(void* stream, const Reduction& reduction, void* accumulator, const void* contribution, int64_t num_elements) const = 0;
  virtual void accumulate(void* stream, const Reduction& reduction, void* accumulator, const void* contribution, int64_t num_elements) const = 0;
  virtual void finishAccumulator(void* stream, const Reduction& reduction, void* accumulator, int64_t num_elements) const = 0;
};

/// Does the work at once, on the host.
class HostKernels final : public StreamKernels {
 public:
  void pack(void* /*stream*/, const StridedBox& src, int64_t begin, int64_t end, int64_t item_bytes, void* dst) const override {
    packRange(src, begin, end, item_bytes, dst);
  }
  void unpack(void* /*stream*/, const void* src, const StridedBox& dst, int64_t begin, int64_t end, int64_t item_bytes) const override {
    unpackRange(src, dst, begin, end, item_bytes);
  }
  void copy(void* /*stream*/, const StridedBox& src, const StridedBox& dst, int64_t num_elements, int64_t item_bytes) const override {
    copyRange(src, dst, 0, num_elements, item_bytes);
  }
  void initAccumulator(void* /*stream*/, const Reduction& reduction, void* accumulator, const void* contribution,
                       int64_t num_elements) const override {
    runtime::initAccumulator(reduction, accumulator, contribution, num_elements);
  }
  void accumulate(void* /*stream*/, const Reduction& reduction, void* accumulator, const void* contribution, int64_t num_elements) const override {
    runtime::accumulate(reduction, accumulator, contribution, num_elements);
  }
  void finishAccumulator(void* /*stream*/, const Reduction& reduction, void* accumulator, int64_t num_elements) const override {
    runtime::finishAccumulator(reduction, accumulator, num_elements);
  }
};

}  // namespace xmesh::runtime
