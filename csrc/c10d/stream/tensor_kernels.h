#pragma once

#include <c10/core/Device.h>

#include "runtime/stream/stream_kernels.h"

namespace xmesh::c10d_backend {

/// The local work of a StreamExecutor in torch's own operators, on the thread's current stream of any kind of device.
class TensorKernels final : public runtime::StreamKernels {
 public:
  explicit TensorKernels(c10::Device device) : device_(device) {}
  void pack(void* stream, const runtime::StridedBox& src, int64_t begin, int64_t end, int64_t item_bytes, void* dst) const override;
  void unpack(void* stream, const void* src, const runtime::StridedBox& dst, int64_t begin, int64_t end, int64_t item_bytes) const override;
  void copy(void* stream, const runtime::StridedBox& src, const runtime::StridedBox& dst, int64_t num_elements, int64_t item_bytes) const override;
  void initAccumulator(void* stream, const runtime::Reduction& reduction, void* accumulator, const void* contribution,
                       int64_t num_elements) const override;
  void accumulate(void* stream, const runtime::Reduction& reduction, void* accumulator, const void* contribution,
                  int64_t num_elements) const override;
  void finishAccumulator(void* stream, const runtime::Reduction& reduction, void* accumulator, int64_t num_elements) const override;

 private:
  const c10::Device device_;
};

}  // namespace xmesh::c10d_backend
