#include "c10d/stream/communicator_use.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <exception>

namespace xmesh::c10d_backend {

CommunicatorUse& communicatorUse() {
  static CommunicatorUse use;
  return use;
}

int64_t freeBytes(c10::Device device) noexcept {
  try {
    return static_cast<int64_t>(c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index()).first);
  } catch (const std::exception&) {
    return -1;
  }
}

}  // namespace xmesh::c10d_backend
