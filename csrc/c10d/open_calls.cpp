#include "c10d/open_calls.h"

#include <utility>

namespace xmesh::c10d_backend {
OpenCall::OpenCall(GuardedCall call, std::function<void(const std::exception_ptr& error)> give_up)
    : call_(std::move(call)), give_up_(std::move(give_up)) {}

bool OpenCall::settle() {
  const std::lock_guard lock(mutex_);
  return !std::exchange(is_settled_, true);
}

std::function<void()> OpenCall::abandon(const std::exception_ptr& error) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(is_settled_, true)) {
    return nullptr;
  }
  error_ = error;
  return [give_up = give_up_, error] { give_up(error); };
}

std::exception_ptr OpenCall::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void OpenCalls::add(const Handle& call) {
  const std::lock_guard lock(mutex_);
  calls_.insert(call);
}

void OpenCalls::remove(const Handle& call) {
  const std::lock_guard lock(mutex_);
  calls_.erase(call);
}

std::vector<OpenCalls::Handle> OpenCalls::late() {
  const std::lock_guard lock(mutex_);
  std::vector<Handle> out;
  for (const Handle& call : calls_) {
    if (call->num_looks++ > 0) {
      out.push_back(call);
    }
  }
  return out;
}

bool OpenCalls::empty() const {
  const std::lock_guard lock(mutex_);
  return calls_.empty();
}

}  // namespace xmesh::c10d_backend
