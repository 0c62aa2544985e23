// Links c10d's NCCL as reshards on a CUDA device use it: over BackendTransport and DeviceLine. Without a driver it must be refused in words. Built
// and run by test_cuda.py.
#include <nccl.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "c10d/stream/backend_transport.h"
#include "c10d/stream/device_line.h"

int main() {
  int version = 0;
  ncclGetVersion(&version);
  std::printf("nccl %d, compiled against %d\n", version, NCCL_VERSION_CODE);
  try {
    auto line = std::make_shared<xmesh::c10d_backend::DeviceLine>(c10::Device(c10::kCUDA, 0));
    auto backend = c10::make_intrusive<::c10d::ProcessGroupNCCL>(c10::make_intrusive<::c10d::HashStore>(), 0, 1);
    const xmesh::c10d_backend::BackendTransport transport(std::move(backend), std::move(line));
    std::printf("made\n");
  } catch (const std::exception& error) {
    std::printf("refused: %s\n", error.what());
  }
}
