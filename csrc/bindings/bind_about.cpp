#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "c10d/stream/communicator_use.h"
#include "cuda/loaded_library.h"

namespace xmesh::bindings {
namespace {

std::pair<std::optional<std::string>, std::optional<std::string>> cudaKernels() {
  const cuda::LoadedLibrary& loaded = cuda::loadedLibrary();
  if (!loaded.library.has_value()) {
    return {std::nullopt, loaded.reason};
  }
  const int error = loaded.library->look();
  return {loaded.library->architectures(), error == 0 ? std::nullopt : std::optional<std::string>(loaded.library->error_text(error))};
}

std::pair<int64_t, int64_t> deviceCommunicators() {
  const c10d_backend::CommunicatorUse& use = c10d_backend::communicatorUse();
  return {use.count.load(), use.num_bytes.load()};
}

}  // namespace

void bindAbout(pybind11::module_& module) {
  module.def("device_communicators", &deviceCommunicators,
             "How many communicators of the library's own live in this process, and by how many bytes the devices' free memory fell while they were "
             "made (0 where a device does not say).");
  module.def("cuda_kernels", &cudaKernels,
             "What the own CUDA kernels were compiled for (\"sm_80, sm_90\"; None without them), and why they are not used here (None where nothing "
             "is known against it).",
             pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace xmesh::bindings
