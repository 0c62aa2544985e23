#pragma once

#include "cuda/copy_launch.h"
#include "cuda/reduce_launch.h"

/// The library of CUDA kernels, loaded where there is a CUDA device. It has a CUDA runtime of its own inside, which shares each device's primary
/// context with torch's. Results are cudaError_t. Threading: any thread. Launches are put on `stream`, a cudaStream_t of `device`; nothing is
/// allocated, nothing waits.
extern "C" {
int xmesh_cuda_copy(int device, void* stream, const xmesh::cuda::CopyLaunch* launch);
int xmesh_cuda_reduce(int device, void* stream, const xmesh::cuda::ReduceLaunch* launch);
/// Whether the kernels run on a device; loads them all. CUDA by itself loads each at its first launch, and may wait there for what is on the device.
int xmesh_cuda_load(int device);
/// Whether there is a device at all; it is not touched.
int xmesh_cuda_look();
/// What a result says, for a person.
const char* xmesh_cuda_error_text(int error);
/// For which devices the kernels were compiled: "sm_80, sm_90".
const char* xmesh_cuda_architectures();
}

namespace xmesh::cuda {

/// The functions of the library.
struct Library {
  decltype(&xmesh_cuda_copy) copy = nullptr;
  decltype(&xmesh_cuda_reduce) reduce = nullptr;
  decltype(&xmesh_cuda_load) load = nullptr;
  decltype(&xmesh_cuda_look) look = nullptr;
  decltype(&xmesh_cuda_error_text) error_text = nullptr;
  decltype(&xmesh_cuda_architectures) architectures = nullptr;
};

}  // namespace xmesh::cuda
