#include "runtime/reshard_call.h"

#include <utility>

namespace xmesh::runtime {

bool ReshardCall::wait(std::chrono::milliseconds timeout) {
  if (!isCompleted()) {
    std::unique_lock lock(mutex_);
    const auto has_ended = [this] { return isCompleted(); };
    if (timeout.count() > 0) {
      if (!ended_.wait_for(lock, timeout, has_ended)) {
        return false;
      }
    } else {
      ended_.wait(lock, has_ended);
    }
  }
  if (failure_.has_value()) {
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
