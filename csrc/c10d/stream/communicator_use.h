#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>

namespace xmesh::c10d_backend {

/// The library's own communicators in this process. Threading: any thread.
struct CommunicatorUse {
  std::atomic<int64_t> count = 0;
  std::atomic<int64_t> num_bytes = 0;  ///< by which the device's free memory fell while they were made; 0 where the device does not say
};
CommunicatorUse& communicatorUse();

/// The device's free memory; -1 where it does not say.
int64_t freeBytes(c10::Device device) noexcept;

}  // namespace xmesh::c10d_backend
