#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "runtime/stream/stream_kernels.h"

namespace xmesh::c10d_backend {

/// The kernels for a device: of a CUDA one CudaKernels where they were built and run there, else TensorKernels.
std::shared_ptr<const runtime::StreamKernels> kernelsOf(c10::Device device);

}  // namespace xmesh::c10d_backend
