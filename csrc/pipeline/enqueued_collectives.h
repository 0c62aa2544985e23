#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include "runtime/fork_mark.h"

namespace xmesh::pipeline {

/// Collectives that stand in a device's stream, where nobody may be waiting for them but the device. One that has not ended within the timeout from
/// when the device came to it is told of, once; it is noticed within another half of that. Threading: any thread; close() from one that is not told.
/// Its thread is there from the first collective on.
class EnqueuedCollectives {
 public:
  using Clock = std::chrono::steady_clock;
  /// Whether the device has come to the collective, or is through. What it throws is a sign that the device has failed, which is told, too.
  using Query = std::function<bool()>;

  /// `tell` is called on the thread, without locks.
  EnqueuedCollectives(std::chrono::milliseconds timeout, std::function<void()> tell);
  ~EnqueuedCollectives();
  EnqueuedCollectives(const EnqueuedCollectives&) = delete;
  EnqueuedCollectives& operator=(const EnqueuedCollectives&) = delete;

  /// In the order in which they are enqueued.
  void add(Query has_begun, Query has_ended);
  /// The thread is gone. Idempotent.
  void close() noexcept;

 private:
  struct Entry {
    Query has_begun;
    Query has_ended;
    std::optional<Clock::time_point> deadline;  ///< once it is known to have begun
  };
  void run() noexcept;
  /// With the lock held.
  void dropEnded();
  /// With the lock held: whether one is late, or its device has failed.
  bool isLate();

  const std::chrono::milliseconds timeout_;
  const std::function<void()> tell_;
  const runtime::ForkMark fork_;
  std::mutex mutex_;  ///< guards what is below
  std::condition_variable changed_;
  std::deque<Entry> entries_;
  bool is_closed_ = false;
  std::thread thread_;
};

}  // namespace xmesh::pipeline
