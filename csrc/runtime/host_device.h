#pragma once

/// Marks what runs on the host and in CUDA kernels.
#ifdef __CUDACC__
#define XMESH_HOST_DEVICE __host__ __device__
#else
#define XMESH_HOST_DEVICE
#endif
