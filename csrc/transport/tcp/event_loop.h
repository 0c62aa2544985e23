#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/socket.h"

namespace xmesh::transport {

/// Who is told that a file descriptor is readable, writable or broken. Called on the loop's thread.
class FdHandler {
 public:
  virtual ~FdHandler() = default;
  /// `events` are EPOLL* flags.
  virtual void onEvents(uint32_t events) = 0;
};

/// One thread that waits in epoll and runs tasks, timers and descriptor handlers, one at a time. It never spins.
/// Threading: post() and stop() from any thread; the rest on the loop's thread, or before start().
/// What a task or handler throws is passed to the error sink; the loop goes on.
class EventLoop {
 public:
  using Clock = std::chrono::steady_clock;
  using Task = std::function<void()>;

  /// `turn_end` runs after every turn; when it returns true the loop does not sleep before the next one.
  EventLoop(std::function<bool()> turn_end, std::function<void(const std::string&)> error_sink);
  /// Stops and joins.
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  void start();
  /// The thread ends after its current turn; tasks not yet run never run.
  void stop();
  void join();

  /// Runs `task` after the tasks posted before. Costs a system call only when the loop sleeps.
  void post(Task task);
  bool onThread() const { return std::this_thread::get_id() == thread_id_.load(std::memory_order_relaxed); }

  uint64_t startTimer(std::chrono::milliseconds delay, Task task);
  /// A timer that has fired, or zero, is ignored.
  void cancelTimer(uint64_t timer);

  /// Returns the id for remove(); the handler is not called after that, also not for events already fetched.
  uint64_t add(int fd, uint32_t events, FdHandler& handler);
  void remove(uint64_t id);

 private:
  struct Registration {
    int fd = -1;
    FdHandler* handler = nullptr;
  };

  void run();
  void turn(bool may_sleep);
  int timeoutMs(bool may_sleep) const;
  void runTimers();
  /// Runs `call`; what it throws goes to the error sink.
  template <typename Call>
  void guard(const Call& call);

  std::function<bool()> turn_end_;
  std::function<void(const std::string&)> error_sink_;
  Fd epoll_;
  Fd wakeup_;
  std::thread thread_;
  std::atomic<std::thread::id> thread_id_{};

  std::mutex mutex_;  ///< guards the three below
  std::vector<Task> posted_;
  bool sleeps_ = false;
  bool stopped_ = false;

  std::vector<Task> running_;
  uint64_t next_id_ = 1;
  std::unordered_map<uint64_t, Registration> registrations_;
  std::map<std::pair<Clock::time_point, uint64_t>, Task> timers_;
  std::unordered_map<uint64_t, Clock::time_point> timer_due_;
};

}  // namespace xmesh::transport
