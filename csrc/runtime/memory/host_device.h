#pragma once

/// Marks what runs on the host and in CUDA kernels, and what is called there rather than made part of each caller, which would be too many.
#ifdef __CUDACC__
#define XMESH_HOST_DEVICE __host__ __device__
#define XMESH_NOT_INLINE __noinline__
#else
#define XMESH_HOST_DEVICE
#define XMESH_NOT_INLINE
#endif
