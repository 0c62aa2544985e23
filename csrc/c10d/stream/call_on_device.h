#pragma once

#include <c10/core/Event.h>

#include <chrono>

#include "runtime/executor.h"

namespace xmesh::c10d_backend {

/// One call on a device between its caller's streams and its line's. Threading: made on the caller's thread, whose current stream it starts behind;
/// orderCurrentStream() once the call is enqueued, on any thread.
class CallOnDevice final : public runtime::CallerStreams {
 public:
  explicit CallOnDevice(c10::Device device);
  c10::Device device() const { return device_; }
  void waitForCaller(void* stream) override;
  void markEnd(void* stream) override;
  /// The calling thread's current stream goes on behind the call.
  void orderCurrentStream();

 private:
  const c10::Device device_;
  c10::Event ready_;
  c10::Event end_;
};

}  // namespace xmesh::c10d_backend
