#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "runtime/fork_mark.h"

namespace xmesh::pipeline {

/// Collectives that stand in a device's stream, and for which nobody may be waiting but the device: one that has not ended after the timeout is
/// told of once. Threading: any thread; close() from one that is not told. Its thread is there from the first collective on.
class EnqueuedCollectives {
 public:
  using Clock = std::chrono::steady_clock;

  /// `tell` is called on the thread, without locks.
  EnqueuedCollectives(std::chrono::milliseconds timeout, std::function<void()> tell);
  ~EnqueuedCollectives();
  EnqueuedCollectives(const EnqueuedCollectives&) = delete;
  EnqueuedCollectives& operator=(const EnqueuedCollectives&) = delete;

  /// In the order in which they are enqueued.
  void add(c10::intrusive_ptr<::c10d::Work> work);
  /// The thread is gone. Idempotent.
  void close() noexcept;

 private:
  struct Entry {
    c10::intrusive_ptr<::c10d::Work> work;
    Clock::time_point deadline;
  };
  void run();
  /// With the lock held: lets go of those that have ended.
  void dropEnded();

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
