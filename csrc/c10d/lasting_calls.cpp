// What CollectiveFaults does, look after look, about calls on gloo that last.
#include <c10/util/Logging.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "c10d/collective_faults.h"

namespace xmesh::c10d_backend {
namespace {

using runtime::Failure;

constexpr int kLooksAfterDeath = 3;   ///< of the watch, that find the other end of a message gone: what it sent is read meanwhile
constexpr int kLooksAfterLeave = 60;  ///< the same where it has left in order, and this rank receives
constexpr int kLooksAfterEnd = 10;    ///< the same where nobody knows how it went

}  // namespace

std::optional<Failure> CollectiveFaults::lossOfNext() {
  if (!loss_of_next_.has_value() && next_ != nullptr && next_->hasDied()) {
    loss_of_next_ = lost({(rank_ + 1) % static_cast<int>(global_ranks_.size())});
    tellOthers(*loss_of_next_);
  }
  return loss_of_next_;
}

bool CollectiveFaults::isPeerLost(OpenCall& call) {
  const int peer = call.call().peer;
  if (call.call().is_collective || peer < 0 || addresses_.at(static_cast<size_t>(peer)).address.empty()) {
    return false;
  }
  transport::LifeWatch& watch = peers_.try_emplace(peer, addresses_[static_cast<size_t>(peer)].address).first->second;
  call.num_looks_at_end = watch.isGone() ? call.num_looks_at_end + 1 : 0;
  const bool is_over = watch.hasDied() || call.call().is_send;
  return call.num_looks_at_end >= (is_over ? kLooksAfterDeath : watch.hasLeft() ? kLooksAfterLeave : kLooksAfterEnd);
}

void CollectiveFaults::abandon(const OpenCalls::Handle& call, Failure failure, std::vector<std::function<void()>>& frees) {
  failure.text = here(call->call().what) + failure.text;
  try {
    runtime::throwFailure(failure);
  } catch (...) {
    if (std::function<void()> free = call->abandon(std::current_exception())) {
      has_abandoned_.store(has_abandoned_.load() || call->call().is_collective);
      frees.push_back(std::move(free));
    }
  }
  open_calls_.remove(call);
}

void CollectiveFaults::look() noexcept {
  try {
    std::optional<Failure> failure;
    bool has_left = false;
    {
      const std::lock_guard lock(mutex_);
      failure = failure_;
      has_left = has_left_;
    }
    if (has_left && !failure.has_value()) {
      return;
    }
    const std::optional<Failure> loss = has_left ? std::nullopt : lossOfNext();
    const std::vector<OpenCalls::Handle> late = open_calls_.late();
    if (!failure.has_value() && std::any_of(late.begin(), late.end(), [](const auto& call) { return call->call().is_collective; })) {
      failure = told();
      if (!failure.has_value()) {
        failure = loss;
      }
      const std::lock_guard lock(mutex_);
      if (failure_.has_value()) {
        failure = failure_;
      }
      failure_ = failure;
      settled_.notify_all();
    }
    std::vector<std::function<void()>> frees;
    if (failure.has_value() && !late.empty()) {
      break_off_();
      if (std::exchange(has_broken_off_, true)) {
        for (const OpenCalls::Handle& call : late) {
          abandon(call, *failure, frees);
        }
      }
    }
    for (const OpenCalls::Handle& call : late) {
      if (isPeerLost(*call)) {
        abandon(call, lost({call->call().peer}), frees);
      }
    }
    if (!frees.empty()) {
      // Callbacks of futures may take as long as they like.
      std::thread([frees = std::move(frees)] {
        for (const std::function<void()>& free : frees) {
          try {
            free();
          } catch (const std::exception& error) {
            LOG(WARNING) << "xmesh: a callback of a call that has failed has failed: " << error.what();
          }
        }
      }).detach();
    }
  } catch (const std::exception&) {
    return;  // no memory for a text, or no thread
  }
}

bool CollectiveFaults::mayHaveLostCalls() const {
  const std::lock_guard lock(mutex_);
  return has_abandoned_.load() || (failure_.has_value() && !open_calls_.empty());
}

}  // namespace xmesh::c10d_backend
