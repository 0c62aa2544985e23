#pragma once

#include "cuda/copy_launch.h"
#include "cuda/reduce_launch.h"

/// The library of CUDA kernels, loaded where there is a CUDA device. It has a CUDA runtime of its own inside, which shares each device's primary
/// context with torch's. Results are cudaError_t. Threading: any thread. Launches are put on `stream`, a cudaStream_t of `device`; nothing is
/// allocated, nothing waits.
extern "C" {
int xmesh_cuda_copy(int device, void* stream, const xmesh::cuda::CopyLaunch* launch);
int xmesh_cuda_reduce(int device, void* stream, const xmesh::cuda::ReduceLaunch* launch);
int xmesh_cuda_device_count(int* count);
/// What an error is called, for a person.
const char* xmesh_cuda_error_text(int error);
/// For which devices the kernels were compiled: "sm_80, sm_90".
const char* xmesh_cuda_architectures();
}
