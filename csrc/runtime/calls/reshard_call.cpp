#include "runtime/calls/reshard_call.h"

#include <algorithm>
#include <utility>

#include "runtime/interrupts.h"

namespace xmesh::runtime {
namespace {

constexpr std::chrono::milliseconds kLookEvery{200};  ///< for interrupts

}  // namespace

bool ReshardCall::wait(std::chrono::milliseconds timeout) { return waitFor(timeout, Until::kEnd); }

bool ReshardCall::waitMoved(std::chrono::milliseconds timeout) { return waitFor(timeout, Until::kMoved); }

bool ReshardCall::waitEnqueued(std::chrono::milliseconds timeout) { return waitFor(timeout, Until::kEnqueued); }

void ReshardCall::markMoved() { mark(is_moved_); }

void ReshardCall::markEnqueued() { mark(is_enqueued_); }

void ReshardCall::mark(std::atomic<bool>& flag) {
  {
    const std::lock_guard lock(mutex_);
    flag.store(true, std::memory_order_release);
  }
  ended_.notify_all();
}

bool ReshardCall::hasCome(Until until) const {
  return isCompleted() || (until == Until::kMoved && is_moved_.load(std::memory_order_acquire)) ||
         (until == Until::kEnqueued && is_enqueued_.load(std::memory_order_acquire));
}

bool ReshardCall::waitFor(std::chrono::milliseconds timeout, Until until, bool is_interruptible) {
  const auto has_come = [this, until] { return hasCome(until); };
  if (!has_come()) {
    fork_.check();
    using Clock = std::chrono::steady_clock;
    const Clock::time_point deadline = timeout.count() > 0 ? Clock::now() + timeout : Clock::time_point::max();
    std::unique_lock lock(mutex_);
    while (!ended_.wait_until(lock, std::min(deadline, Clock::now() + kLookEvery), has_come)) {
      if (Clock::now() >= deadline) {
        return false;
      }
      if (is_interruptible) {
        lock.unlock();
        checkInterrupts();
        lock.lock();
      }
    }
  }
  if (isCompleted() && failure_.has_value()) {
    throwFailure(*failure_);
  }
  return true;
}

void ReshardCall::onCompletion(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    if (!isCompleted()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

void ReshardCall::complete(std::optional<Failure> failure) {
  std::vector<std::function<void()>> callbacks;
  {
    const std::lock_guard lock(mutex_);
    failure_ = std::move(failure);
    ended_at_ = std::chrono::steady_clock::now();
    is_completed_.store(true, std::memory_order_release);
    callbacks.swap(callbacks_);
  }
  ended_.notify_all();  // after the unlock: who wakes would only wait for the mutex
  for (const std::function<void()>& callback : callbacks) {
    callback();
  }
}

}  // namespace xmesh::runtime
