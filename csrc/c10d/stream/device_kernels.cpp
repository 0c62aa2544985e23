#include "c10d/stream/device_kernels.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Logging.h>

#include "c10d/stream/tensor_kernels.h"
#include "cuda/cuda_kernels.h"
#include "cuda/loaded_library.h"

namespace xmesh::c10d_backend {
namespace {

/// Null where they do not run.
std::shared_ptr<const runtime::StreamKernels> cudaKernels(c10::Device device) {
  const std::optional<cuda::Library>& library = cuda::loadedLibrary().library;
  if (!library.has_value()) {
    return nullptr;
  }
  const c10::DeviceGuard on_device(device);  // afterwards torch's device is this thread's again
  if (const int error = library->load(device.index()); error != 0) {
    LOG(WARNING) << "xmesh: torch's operators pack on " << device << ", its own kernels do not run there: " << library->error_text(error);
    return nullptr;
  }
  const auto current_stream = [device] { return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle(); };
  return std::make_shared<cuda::CudaKernels>(*library, device.index(), current_stream);
}

}  // namespace

std::shared_ptr<const runtime::StreamKernels> kernelsOf(c10::Device device) {
  std::shared_ptr<const runtime::StreamKernels> own = device.is_cuda() ? cudaKernels(device) : nullptr;
  return own != nullptr ? own : std::make_shared<TensorKernels>(device);
}

}  // namespace xmesh::c10d_backend
