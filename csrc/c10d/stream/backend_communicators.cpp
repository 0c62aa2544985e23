#include "c10d/stream/backend_communicators.h"

#include <stdexcept>
#include <utility>

namespace xmesh::c10d_backend {

runtime::Communicators::Proposal BackendCommunicators::propose(const runtime::Participants& participants) {
  const std::lock_guard lock(mutex_);
  const Entry& entry = entries_[participants.ranks];
  const bool is_there = entry.transport != nullptr && !entry.transport->isAborted();
  return {is_there ? entry.generation : entry.generation + 1, entry.hold};
}

std::shared_ptr<transport::StreamTransport> BackendCommunicators::of(const runtime::Participants& participants, uint64_t generation) {
  const Ranks& ranks = participants.ranks;
  Gone gone;
  {
    const std::lock_guard lock(mutex_);
    Entry& entry = entries_[ranks];
    if (entry.generation == generation && entry.transport != nullptr && !entry.transport->isAborted()) {
      touch(ranks);
      return entry.transport;
    }
    if (entry.generation >= generation) {
      throw std::runtime_error("the communicator of its ranks was given up after another call had failed");
    }
    entry.generation = generation;
    entry.failure.reset();
    gone.push_back(std::exchange(entry.transport, nullptr));
    touch(ranks);
    makeRoom(gone);
  }
  // What is enqueued on those still has to run: they end when the stream has passed it.
  line_->whenPassed([gone = std::move(gone)](const std::string* /*error*/) {});
  std::string name = std::to_string(generation) + ":";
  for (const int64_t rank : ranks) {
    name += "," + std::to_string(rank);
  }
  auto made = std::make_shared<BackendTransport>(make_(name, static_cast<int>(participants.my_index), ranks), line_);
  {
    const std::lock_guard lock(mutex_);
    Entry& entry = entries_[ranks];
    if (entry.failure.has_value()) {
      throw std::runtime_error(entry.failure->reason);
    }
    entry.transport = made;  // from here on abort() reaches it
  }
  made->connect();
  return made;
}

/// The lock is held.
void BackendCommunicators::makeRoom(Gone& gone) {
  for (auto oldest = used_.begin(); used_.size() > kMaxCommunicators && oldest != used_.end();) {
    Entry& entry = entries_[*oldest];
    if (entry.hold.use_count() > 1) {
      ++oldest;
    } else {
      gone.push_back(std::exchange(entry.transport, nullptr));
      oldest = used_.erase(oldest);
    }
  }
}

void BackendCommunicators::touch(const Ranks& ranks) {
  used_.remove(ranks);
  used_.push_back(ranks);
}

void BackendCommunicators::abort(const runtime::Participants& participants, const transport::StreamFailure& failure) noexcept {
  Gone found;
  {
    const std::lock_guard lock(mutex_);
    if (const auto entry = entries_.find(participants.ranks); entry != entries_.end()) {
      entry->second.failure = failure;
      found.push_back(entry->second.transport);
    }
  }
  abortThose(found, failure);
}

void BackendCommunicators::abortAll(const transport::StreamFailure& failure) noexcept {
  Gone all;
  {
    const std::lock_guard lock(mutex_);
    for (auto& [ranks, entry] : entries_) {
      entry.failure = failure;
      all.push_back(entry.transport);
    }
  }
  abortThose(all, failure);
}

void BackendCommunicators::abortThose(const Gone& those, const transport::StreamFailure& failure) noexcept {
  for (const auto& transport : those) {
    if (transport != nullptr) {
      transport->abort(failure);
    }
  }
}

}  // namespace xmesh::c10d_backend
