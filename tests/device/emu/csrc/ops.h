// Operators of the emulated device: each runs the CPU's kernel, as a task of the current stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>

namespace emu {

// A CPU tensor over the same memory. It owns nothing, so a task may keep and drop it.
at::Tensor aliasOf(const at::Tensor& tensor);
// Another tensor over the same storage that no Python object belongs to.
at::Tensor detached(const at::Tensor& tensor);

// Host tensors that tasks have used. They are dropped by the next caller, never by a stream's thread: dropping one may need Python's lock.
void keepForCaller(at::Tensor tensor);
void dropKept();

struct OperatorCounts {
  std::atomic<int64_t> num_async{0};   // ran as a task
  std::atomic<int64_t> num_synced{0};  // the host waited for the stream and ran them itself
};
OperatorCounts& operatorCounts();

}  // namespace emu
