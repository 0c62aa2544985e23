#include "c10d/stream/backend_communicators.h"

#include <stdexcept>
#include <utility>

namespace xmesh::c10d_backend {

uint64_t BackendCommunicators::generation(const runtime::Participants& participants) const {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(participants.ranks);
  if (found == entries_.end()) {
    return 1;
  }
  const Entry& entry = found->second;
  return entry.transport != nullptr && !entry.transport->isAborted() ? entry.generation : entry.generation + 1;
}

std::shared_ptr<transport::StreamTransport> BackendCommunicators::of(const runtime::Participants& participants, uint64_t generation) {
  const Ranks& ranks = participants.ranks;
  std::vector<std::shared_ptr<BackendTransport>> gone;  // destroyed without the lock
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
    gone.push_back(std::exchange(entry.transport, nullptr));
    touch(ranks);
    for (; used_.size() > kMaxCommunicators; used_.pop_front()) {
      gone.push_back(std::exchange(entries_[used_.front()].transport, nullptr));
    }
  }
  // What is enqueued on those still has to run: they end when the stream has passed it.
  line_->whenPassed([gone = std::move(gone)](const std::string* /*error*/) {});
  std::string name = std::to_string(generation) + ":";
  for (const int64_t rank : ranks) {
    name += "," + std::to_string(rank);
  }
  auto made = std::make_shared<BackendTransport>(make_(name, static_cast<int>(participants.my_index), ranks), line_);
  const std::lock_guard lock(mutex_);
  return entries_[ranks].transport = made;
}

void BackendCommunicators::touch(const Ranks& ranks) {
  used_.remove(ranks);
  used_.push_back(ranks);
}

void BackendCommunicators::abort(const runtime::Participants& participants, const transport::StreamFailure& failure) noexcept {
  std::shared_ptr<BackendTransport> transport;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = entries_.find(participants.ranks); found != entries_.end()) {
      transport = found->second.transport;
    }
  }
  if (transport != nullptr) {
    transport->abort(failure);
  }
}

void BackendCommunicators::abortAll(const transport::StreamFailure& failure) noexcept {
  std::vector<std::shared_ptr<BackendTransport>> all;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [ranks, entry] : entries_) {
      if (entry.transport != nullptr) {
        all.push_back(entry.transport);
      }
    }
  }
  for (const auto& transport : all) {
    transport->abort(failure);
  }
}

}  // namespace xmesh::c10d_backend
