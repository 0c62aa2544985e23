#pragma once

#include <functional>
#include <utility>

#include "cuda/library.h"
#include "runtime/stream/stream_kernels.h"

namespace xmesh::cuda {

/// The local work of a StreamExecutor in kernels of the library, one launch per call where the boxes fit into one. The values are the host's, bit for
/// bit. What cannot be launched throws std::runtime_error with CUDA's text.
class CudaKernels final : public runtime::StreamKernels {
 public:
  /// `current_stream` is asked where a call names no stream.
  CudaKernels(const Library& library, int device, std::function<void*()> current_stream)
      : library_(library), device_(device), current_stream_(std::move(current_stream)) {}
  void pack(void* stream, std::span<const runtime::PackedRange> ranges) const override;
  void unpack(void* stream, std::span<const runtime::PackedRange> ranges) const override;
  void copy(void* stream, std::span<const runtime::BoxPair> pairs) const override;
  void reduce(void* stream, std::span<const runtime::ReductionPart> parts) const override;

 private:
  template <typename Launch>
  std::function<void(const Launch&)> launchOn(void* stream, int (*launch)(int, void*, const Launch*)) const;

  const Library library_;
  const int device_;
  const std::function<void*()> current_stream_;
};

}  // namespace xmesh::cuda
