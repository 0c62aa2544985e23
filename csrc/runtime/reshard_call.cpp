#include "runtime/reshard_call.h"

#include <algorithm>
#include <utility>

#include "runtime/interrupts.h"

namespace xmesh::runtime {
namespace {

constexpr std::chrono::milliseconds kLookEvery{200};  ///< for interrupts

}  // namespace

bool ReshardCall::wait(std::chrono::milliseconds timeout) { return waitFor(timeout, false); }

bool ReshardCall::waitMoved(std::chrono::milliseconds timeout) { return waitFor(timeout, true); }

void ReshardCall::markMoved() {
  {
    const std::lock_guard lock(mutex_);
    is_moved_.store(true, std::memory_order_release);
  }
  ended_.notify_all();
}

bool ReshardCall::waitFor(std::chrono::milliseconds timeout, bool until_moved, bool is_interruptible) {
  const auto has_ended = [this, until_moved] { return isCompleted() || (until_moved && is_moved_.load(std::memory_order_acquire)); };
  if (!has_ended()) {
    fork_.check();
    using Clock = std::chrono::steady_clock;
    const Clock::time_point deadline = timeout.count() > 0 ? Clock::now() + timeout : Clock::time_point::max();
    std::unique_lock lock(mutex_);
    while (!ended_.wait_until(lock, std::min(deadline, Clock::now() + kLookEvery), has_ended)) {
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
