#include "c10d/open_calls.h"

#include <utility>

namespace xmesh::c10d_backend {
namespace {

constexpr int kLooksUntilLost = 3;  ///< that find the other end gone: what it sent before is read meanwhile

}  // namespace

OpenCall::OpenCall(GuardedCall call, std::function<void(const std::exception_ptr& error)> give_up)
    : call_(std::move(call)), give_up_(std::move(give_up)) {}

bool OpenCall::settle() {
  const std::lock_guard lock(mutex_);
  return !std::exchange(is_settled_, true);
}

void OpenCall::abandon(const std::exception_ptr& error) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(is_settled_, true)) {
      return;
    }
    error_ = error;
  }
  give_up_(error);
}

std::exception_ptr OpenCall::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

bool OpenCall::isPeerLost(const std::string& address) {
  if (call_.is_collective || call_.peer < 0 || address.empty()) {
    return false;
  }
  if (!peer_.has_value()) {
    peer_.emplace(address);
  }
  num_gone_ = peer_->isGone() ? num_gone_ + 1 : 0;
  return num_gone_ >= kLooksUntilLost;
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

}  // namespace xmesh::c10d_backend
