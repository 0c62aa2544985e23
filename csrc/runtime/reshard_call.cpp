#include "runtime/reshard_call.h"

#include <utility>

namespace xmesh::runtime {

bool ReshardCall::isCompleted() const {
  const std::lock_guard lock(mutex_);
  return is_completed_;
}

std::optional<Failure> ReshardCall::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

bool ReshardCall::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const auto has_ended = [this] { return is_completed_; };
  if (timeout.count() > 0) {
    if (!ended_.wait_for(lock, timeout, has_ended)) {
      return false;
    }
  } else {
    ended_.wait(lock, has_ended);
  }
  if (failure_.has_value()) {
    throwFailure(*failure_);
  }
  return true;
}

void ReshardCall::onCompletion(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    if (!is_completed_) {
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
    is_completed_ = true;
    failure_ = std::move(failure);
    callbacks.swap(callbacks_);
    ended_.notify_all();
  }
  for (const std::function<void()>& callback : callbacks) {
    callback();
  }
}

}  // namespace xmesh::runtime
