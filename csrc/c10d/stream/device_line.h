#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace xmesh::c10d_backend {

/// A stream of a device, and the thread that enqueues on it: whatever may block there for a peer or for the device blocks nobody else. On that thread
/// the stream is the current one and no gradients are recorded. Threading: any thread, unless it says otherwise.
class DeviceLine {
 public:
  explicit DeviceLine(c10::Device device);
  ~DeviceLine();
  DeviceLine(const DeviceLine&) = delete;
  DeviceLine& operator=(const DeviceLine&) = delete;

  c10::Device device() const { return device_; }
  /// Runs `task` on the line's thread, after the tasks posted before; never after close().
  void post(std::function<void()> task);
  /// Runs `told` on the line's thread once the stream has passed everything that is enqueued now. The line's thread.
  void whenPassed(std::function<void()> told);
  /// Tells who waits in whenPassed() as long as the stream passes something within a few seconds, then ends the thread. What the stream has not
  /// passed by then keeps its memory for ever: it may still use it. Once.
  void close() noexcept;

 private:
  struct Mark {
    c10::Event event;
    std::function<void()> told;
  };
  void run();
  void tellPassed();

  const c10::Device device_;
  std::mutex mutex_;  ///< guards the three below
  std::condition_variable woken_;
  std::deque<std::function<void()>> tasks_;
  bool is_closed_ = false;
  std::deque<Mark> marks_;  ///< in the stream's order; the line's thread
  std::thread thread_;
};

}  // namespace xmesh::c10d_backend
