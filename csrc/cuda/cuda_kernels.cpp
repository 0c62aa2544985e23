#include "cuda/cuda_kernels.h"

#include <stdexcept>
#include <string>

#include "cuda/launches.h"

namespace xmesh::cuda {

template <typename Launch>
std::function<void(const Launch&)> CudaKernels::launchOn(void* stream, int (*launch)(int, void*, const Launch*)) const {
  return [this, launch, on = stream != nullptr ? stream : current_stream_()](const Launch& next) {
    if (const int error = launch(device_, on, &next); error != 0) {
      throw std::runtime_error("xmesh: a kernel was not launched on cuda:" + std::to_string(device_) + ": " + library_.error_text(error));
    }
  };
}

void CudaKernels::pack(void* stream, std::span<const runtime::PackedRange> ranges) const { packInLaunches(ranges, launchOn(stream, library_.copy)); }

void CudaKernels::unpack(void* stream, std::span<const runtime::PackedRange> ranges) const {
  unpackInLaunches(ranges, launchOn(stream, library_.copy));
}

void CudaKernels::copy(void* stream, std::span<const runtime::BoxPair> pairs) const { copyInLaunches(pairs, launchOn(stream, library_.copy)); }

void CudaKernels::reduce(void* stream, std::span<const runtime::ReductionPart> parts) const {
  reduceInLaunches(parts, launchOn(stream, library_.reduce));
}

}  // namespace xmesh::cuda
