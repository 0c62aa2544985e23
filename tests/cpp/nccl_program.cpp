// Links c10d's NCCL as reshards on a CUDA device use it: over BackendTransport and DeviceLine. Without a driver it must be refused in words. Built
// and run by test_cuda.py.
#include <nccl.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <utility>

#include "c10d/stream/backend_transport.h"
#include "c10d/stream/device_line.h"

namespace {

using xmesh::c10d_backend::DeviceLine;

/// What `make` makes, or null once it has been said why not.
template <typename Make>
auto attempt(const char* what, const Make& make) -> decltype(make()) {
  try {
    auto made = make();
    std::printf("%s: made\n", what);
    return made;
  } catch (const std::exception& error) {
    std::printf("%s: refused: %s\n", what, error.what());
    return nullptr;
  }
}

}  // namespace

int main() {
  int version = 0;
  ncclGetVersion(&version);
  std::printf("nccl %d, compiled against %d\n", version, NCCL_VERSION_CODE);
  const auto line = attempt("line", [] { return std::make_shared<DeviceLine>(c10::Device(c10::kCUDA, 0)); });
  auto backend = attempt("backend", []() -> c10::intrusive_ptr<::c10d::Backend> {
    return c10::make_intrusive<::c10d::ProcessGroupNCCL>(c10::make_intrusive<::c10d::HashStore>(), 0, 1);
  });
  if (line && backend) {
    const xmesh::c10d_backend::BackendTransport transport(std::move(backend), line, std::make_shared<xmesh::c10d_backend::CommunicatorThreads>());
  }
}
