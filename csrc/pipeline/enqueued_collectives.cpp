#include "pipeline/enqueued_collectives.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace xmesh::pipeline {

EnqueuedCollectives::EnqueuedCollectives(std::chrono::milliseconds timeout, std::function<void()> tell) : timeout_(timeout), tell_(std::move(tell)) {}

EnqueuedCollectives::~EnqueuedCollectives() { close(); }

void EnqueuedCollectives::add(Query has_begun, Query has_ended) {
  const std::lock_guard lock(mutex_);
  if (is_closed_) {
    return;
  }
  try {
    dropEnded();
  } catch (const std::exception&) {
    changed_.notify_all();  // the thread sees that it failed
  }
  entries_.push_back({std::move(has_begun), std::move(has_ended), std::nullopt});
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { run(); });
  } else if (entries_.size() == 1) {
    changed_.notify_all();
  }
}

void EnqueuedCollectives::dropEnded() {
  while (!entries_.empty() && entries_.front().has_ended()) {
    entries_.pop_front();
  }
}

bool EnqueuedCollectives::isLate() {
  try {
    dropEnded();
    if (entries_.empty()) {
      return false;
    }
    Entry& first = entries_.front();
    if (!first.deadline.has_value() && first.has_begun()) {
      first.deadline = Clock::now() + timeout_;
    }
    return first.deadline.has_value() && Clock::now() >= *first.deadline;
  } catch (const std::exception&) {
    return true;
  }
}

void EnqueuedCollectives::run() noexcept {
  std::unique_lock lock(mutex_);
  while (!is_closed_) {
    if (isLate()) {
      entries_.clear();
      is_closed_ = true;
      lock.unlock();
      tell_();
      return;
    }
    if (entries_.empty()) {
      changed_.wait(lock);
    } else {
      const auto look = Clock::now() + std::max(timeout_ / 2, std::chrono::milliseconds(1));
      changed_.wait_until(lock, std::min(look, entries_.front().deadline.value_or(look)));
    }
  }
}

void EnqueuedCollectives::close() noexcept {
  if (!fork_.isHere()) {
    if (thread_.joinable()) {
      thread_.detach();  // this process has no such thread
    }
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
