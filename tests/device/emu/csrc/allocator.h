// The caching allocator of device memory. Thread-safe; lives for the whole process.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstdint>

namespace emu {

// Bytes of one device, rounded up to 512 per block.
struct MemoryCounts {
  int64_t live_bytes = 0;     // held by storages
  int64_t peak_bytes = 0;     // the most that has been live
  int64_t pending_bytes = 0;  // freed, but a recorded stream may still use them
  int64_t cached_bytes = 0;   // free for the next allocation on their stream
};

c10::DeviceAllocator& allocator();
MemoryCounts memoryCounts(c10::DeviceIndex device);
// While on (the default), freed memory is overwritten with 0xFF, by a task on the stream that it was allocated on.
void setPoison(bool on);

}  // namespace emu
