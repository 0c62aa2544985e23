#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace xmesh::c10d_backend {

/// A stream of a device, and the thread that enqueues on it: whatever may block there for a peer or for the device blocks nobody else. On that thread
/// the stream is the current one and no gradients are recorded. Threading: any thread, unless it says otherwise.
class DeviceLine {
 public:
  using Told = std::function<void(const std::string* error)>;

  /// Throws where the device has no stream to give.
  explicit DeviceLine(c10::Device device);
  ~DeviceLine();
  DeviceLine(const DeviceLine&) = delete;
  DeviceLine& operator=(const DeviceLine&) = delete;

  c10::Device device() const { return state_->stream.device(); }
  /// Runs `task`, which does not throw, on the line's thread, after the tasks posted before; never after close().
  void post(std::function<void()> task);
  /// Runs `told(nullptr)` on the line's thread once the stream has passed everything that is enqueued now, or with what the device failed with. The
  /// line's thread.
  void whenPassed(Told told);
  /// Blocks until the tasks posted before have run and the stream has passed what they enqueued, for some seconds at most. Not on the line's thread.
  void waitPassed() noexcept;
  /// Tells who waits in whenPassed() as long as the stream passes something within a few seconds, then ends the thread. What the stream has not
  /// passed by then keeps its memory for ever: it may still use it. Tasks that have not run never do. A task that blocks longer keeps the thread.
  /// Once.
  void close() noexcept;

 private:
  struct Mark {
    c10::Event event;
    Told told;
  };
  /// Shared with the thread, which may outlive the line.
  struct State {
    explicit State(c10::Stream own_stream) : stream(own_stream) {}
    void run();
    void mark(Told told);
    void tellPassed();

    const c10::Stream stream;
    std::mutex mutex;  ///< guards all but the marks
    std::condition_variable woken;
    std::deque<std::function<void()>> tasks;
    bool is_closed = false;
    bool has_ended = false;
    std::condition_variable ended;
    std::deque<Mark> marks;  ///< in the stream's order; the line's thread
  };

  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace xmesh::c10d_backend
