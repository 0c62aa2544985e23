#include "pipeline/enqueued_collectives.h"

#include <utility>

namespace xmesh::pipeline {

EnqueuedCollectives::EnqueuedCollectives(std::chrono::milliseconds timeout, std::function<void()> tell) : timeout_(timeout), tell_(std::move(tell)) {}

EnqueuedCollectives::~EnqueuedCollectives() { close(); }

void EnqueuedCollectives::add(c10::intrusive_ptr<::c10d::Work> work) {
  const std::lock_guard lock(mutex_);
  if (is_closed_) {
    return;
  }
  dropEnded();
  entries_.push_back({std::move(work), Clock::now() + timeout_});
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { run(); });
  } else if (entries_.size() == 1) {
    changed_.notify_all();
  }
}

void EnqueuedCollectives::dropEnded() {
  while (!entries_.empty() && entries_.front().work->isCompleted()) {
    entries_.pop_front();
  }
}

void EnqueuedCollectives::run() {
  std::unique_lock lock(mutex_);
  while (!is_closed_) {
    dropEnded();
    if (entries_.empty()) {
      changed_.wait(lock);
    } else if (Clock::now() < entries_.front().deadline) {
      changed_.wait_until(lock, entries_.front().deadline);
    } else {
      entries_.clear();
      is_closed_ = true;
      lock.unlock();
      tell_();
      return;
    }
  }
}

void EnqueuedCollectives::close() noexcept {
  if (!fork_.isHere()) {
    thread_.detach();  // it has no such thread
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
  entries_.clear();
}

}  // namespace xmesh::pipeline
