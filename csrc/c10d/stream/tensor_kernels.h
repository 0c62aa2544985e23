#pragma once

#include <c10/core/Device.h>

#include "runtime/stream/stream_kernels.h"

namespace xmesh::c10d_backend {

/// The local work of a StreamExecutor in torch's own operators, on the thread's current stream of any kind of device.
class TensorKernels final : public runtime::StreamKernels {
 public:
  explicit TensorKernels(c10::Device device) : device_(device) {}
  void pack(void* stream, std::span<const runtime::PackedRange> ranges) const override;
  void unpack(void* stream, std::span<const runtime::PackedRange> ranges) const override;
  void copy(void* stream, std::span<const runtime::BoxPair> pairs) const override;
  void reduce(void* stream, std::span<const runtime::ReductionPart> parts) const override;

 private:
  void reducePart(const runtime::ReductionPart& part) const;

  const c10::Device device_;
};

}  // namespace xmesh::c10d_backend
