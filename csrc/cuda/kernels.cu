#include <cuda_runtime_api.h>

#include "cuda/library.h"

namespace xmesh::cuda {
namespace {

__device__ ThreadIndex here() { return {static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)}; }

/// Few enough registers for so many blocks at once.
constexpr int kBlocksAtOnce = 4;

__global__ void __launch_bounds__(kThreadsPerBlock, kBlocksAtOnce) copyKernel(const __grid_constant__ CopyLaunch launch) { runCopy(launch, here()); }

template <typename T>
__global__ void __launch_bounds__(kThreadsPerBlock, kBlocksAtOnce) reduceKernel(const __grid_constant__ ReduceLaunch launch) {
  runReduce<T>(launch, here());
}

/// The device is this thread's for the CUDA runtime inside; for torch's it already is.
template <typename Launch>
cudaError_t launchOn(int device, void* stream, void (*kernel)(Launch), const Launch& launch) {
  if (const cudaError_t error = cudaSetDevice(device); error != cudaSuccess) {
    return error;
  }
  kernel<<<launch.num_blocks, kThreadsPerBlock, 0, static_cast<cudaStream_t>(stream)>>>(launch);
  return cudaGetLastError();
}

}  // namespace
}  // namespace xmesh::cuda

#pragma GCC visibility push(default)

int xmesh_cuda_copy(int device, void* stream, const xmesh::cuda::CopyLaunch* launch) {
  return xmesh::cuda::launchOn(device, stream, xmesh::cuda::copyKernel, *launch);
}

int xmesh_cuda_reduce(int device, void* stream, const xmesh::cuda::ReduceLaunch* launch) {
  cudaError_t error = cudaSuccess;
  xmesh::runtime::withType(launch->type,
                           [&](auto value) { error = xmesh::cuda::launchOn(device, stream, xmesh::cuda::reduceKernel<decltype(value)>, *launch); });
  return error;
}

int xmesh_cuda_load(int device) {
  cudaError_t error = cudaSetDevice(device);
  const auto load = [&error](auto* kernel) {
    cudaFuncAttributes attributes;
    error = error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, kernel);
  };
  load(xmesh::cuda::copyKernel);
  for (int type = 0; type <= static_cast<int>(xmesh::runtime::ElementType::kComplex128); ++type) {
    xmesh::runtime::withType(static_cast<xmesh::runtime::ElementType>(type), [&](auto value) { load(xmesh::cuda::reduceKernel<decltype(value)>); });
  }
  return error;
}

int xmesh_cuda_look() {
  int count = 0;
  return cudaGetDeviceCount(&count);
}

const char* xmesh_cuda_error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

const char* xmesh_cuda_architectures() { return XMESH_CUDA_ARCHITECTURES; }

#pragma GCC visibility pop
