#include "c10d/stream/backend_communicators.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

namespace xmesh::c10d_backend {

runtime::Communicators::Proposal BackendCommunicators::propose(const runtime::Participants& participants) {
  const std::lock_guard lock(mutex_);
  const Entry& entry = entries_[participants.ranks];
  return {entry.isUsable() ? entry.generation : entry.generation + 1, entry.hold};
}

std::shared_ptr<transport::StreamTransport> BackendCommunicators::of(const runtime::Participants& participants, uint64_t generation) {
  const Ranks& ranks = participants.ranks;
  Gone gone;
  {
    const std::lock_guard lock(mutex_);
    Entry& entry = entries_[ranks];
    throwIfAborted(entry, generation);
    if (const auto found = entry.all.find(generation); found != entry.all.end()) {
      if (std::shared_ptr<BackendTransport> there = found->second.lock(); there != nullptr && !there->isAborted()) {
        touch(ranks);
        return there;
      }
    }
    if (generation <= entry.generation) {
      throw std::runtime_error("the communicator of its ranks was given up");
    }
    entry.generation = generation;
    entry.is_making = true;
    gone.push_back(std::exchange(entry.newest, nullptr));
    touch(ranks);
    makeRoom(gone);
  }
  // What is enqueued on those still has to run: they end when the stream has passed it.
  line_->whenPassed([gone = std::move(gone)](const std::string* /*error*/) {});
  const std::shared_ptr<BackendTransport> made = make(participants, generation);
  made->connect();
  return made;
}

/// From its end on abort() reaches the communicator that it returns.
std::shared_ptr<BackendTransport> BackendCommunicators::make(const runtime::Participants& participants, uint64_t generation) {
  std::string name = std::to_string(generation) + ":";
  for (const int64_t rank : participants.ranks) {
    name += "," + std::to_string(rank);
  }
  std::shared_ptr<BackendTransport> made;
  std::exception_ptr error;
  try {
    made = std::make_shared<BackendTransport>(make_(name, static_cast<int>(participants.my_index), participants.ranks), line_, threads_);
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_[participants.ranks];
  entry.is_making = false;
  if (error != nullptr) {
    std::rethrow_exception(error);
  }
  throwIfAborted(entry, generation);
  std::erase_if(entry.all, [](const auto& one) { return one.second.expired(); });
  entry.all[generation] = made;
  return entry.newest = made;
}

/// The lock is held.
void BackendCommunicators::throwIfAborted(const Entry& entry, uint64_t generation) const {
  if (closed_.has_value()) {
    throw std::runtime_error("no communicator can be used any more: " + closed_->reason);
  }
  if (const auto found = entry.aborted.find(generation); found != entry.aborted.end()) {
    throw std::runtime_error("the communicator of its ranks was given up: " + found->second.reason);
  }
}

/// The lock is held.
void BackendCommunicators::makeRoom(Gone& gone) {
  for (auto oldest = used_.begin(); used_.size() > kMaxCommunicators && oldest != used_.end();) {
    Entry& entry = entries_[*oldest];
    if (entry.hold.use_count() > 1) {
      ++oldest;
    } else {
      gone.push_back(std::exchange(entry.newest, nullptr));
      oldest = used_.erase(oldest);
    }
  }
}

void BackendCommunicators::touch(const Ranks& ranks) {
  used_.remove(ranks);
  used_.push_back(ranks);
}

void BackendCommunicators::abort(const runtime::Participants& participants, uint64_t generation, const transport::StreamFailure& failure) noexcept {
  std::shared_ptr<BackendTransport> found;
  {
    const std::lock_guard lock(mutex_);
    Entry& entry = entries_[participants.ranks];
    entry.aborted.emplace(generation, failure);
    if (entry.aborted.size() > kMaxAborted) {
      entry.aborted.erase(entry.aborted.begin());
    }
    if (const auto one = entry.all.find(generation); one != entry.all.end()) {
      found = one->second.lock();
    }
  }
  if (found != nullptr) {
    found->abort(failure);
  }
}

bool BackendCommunicators::abortAll(const transport::StreamFailure& failure) noexcept {
  Gone found;
  bool is_making = false;
  {
    const std::lock_guard lock(mutex_);
    closed_ = failure;
    for (auto& [ranks, entry] : entries_) {
      entry.aborted.emplace(entry.generation, failure);
      for (const auto& [generation, one] : entry.all) {
        found.push_back(one.lock());
      }
      entry.newest.reset();
      is_making = is_making || entry.is_making;
    }
  }
  std::erase(found, nullptr);
  for (const std::shared_ptr<BackendTransport>& one : found) {
    one->abort(failure);
  }
  return is_making || std::any_of(found.begin(), found.end(), [](const auto& one) { return one.use_count() > 1; });
}

}  // namespace xmesh::c10d_backend
