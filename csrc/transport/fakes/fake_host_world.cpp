#include "transport/fakes/fake_host_world.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace xmesh::transport {
namespace {

constexpr uint64_t kMaxPieces = 3;

std::string rankText(int32_t rank) { return "rank " + std::to_string(rank); }

}  // namespace

FakeHostWorld::FakeHostWorld(int32_t num_ranks, uint64_t seed) : ranks_(static_cast<size_t>(num_ranks)), random_(seed) {}

void FakeHostWorld::push(const QueueKey& key, std::function<void()> what) { queues_[key].push_back(std::move(what)); }

void FakeHostWorld::takePosted() {
  std::vector<std::pair<int32_t, std::function<void()>>> taken;
  {
    const std::lock_guard lock(mutex_);
    taken.swap(posted_);
  }
  for (auto& [rank, task] : taken) {
    if (isAlive(rank)) {
      push({QueueKind::kPost, rank, 0, 0}, std::move(task));
    }
  }
}

bool FakeHostWorld::step() {
  takePosted();
  std::vector<const QueueKey*> candidates;
  candidates.reserve(queues_.size());
  for (const auto& [key, queue] : queues_) {
    if (mayRun(key.rank)) {
      candidates.push_back(&key);
    }
  }
  if (candidates.empty()) {
    return false;
  }
  const auto found = queues_.find(*candidates[random_() % candidates.size()]);
  const std::function<void()> what = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) {
    queues_.erase(found);
  }
  what();
  return true;
}

bool FakeHostWorld::fireNextTimer(std::chrono::milliseconds limit) {
  while (!timers_.empty() && timers_.begin()->first.first <= limit) {
    auto node = timers_.extract(timers_.begin());
    const auto [due, id] = node.key();
    auto& [rank, task] = node.mapped();
    if (timers_alive_.contains(id) && isAlive(rank)) {
      now_ = std::max(now_, due);
      push({QueueKind::kTimer, rank, 0, id}, [this, id = id, task = std::move(task)] {
        if (timers_alive_.erase(id) != 0) {
          task();
        }
      });
      return true;
    }
    timers_alive_.erase(id);
  }
  return false;
}

void FakeHostWorld::join(int32_t rank, PeerEvents& events) {
  Rank& joining = rankAt(rank);
  if (joining.has_joined) {
    throw std::logic_error("FakeHostNetwork::join: " + rankText(rank) + " has joined before");
  }
  joining.events = &events;
  joining.has_joined = joining.is_alive = true;
}

void FakeHostWorld::leave(int32_t rank, bool is_goodbye) {
  Rank& leaving = rankAt(rank);
  if (!leaving.is_alive) {
    return;
  }
  leaving.is_alive = false;
  leaving.said_goodbye = is_goodbye;
  leaving.operations.clear();
  std::erase_if(queues_, [&](const auto& entry) { return entry.first.rank == rank; });
  dropStreams(rank, [](OperationId) { return true; });
  for (const int32_t peer : std::set<int32_t>(leaving.contacts)) {
    meet(peer, rank);
  }
}

void FakeHostWorld::setStopped(int32_t rank, bool is_stopped) { rankAt(rank).is_stopped = is_stopped; }

void FakeHostWorld::post(int32_t rank, std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  posted_.emplace_back(rank, std::move(task));
}

void FakeHostWorld::checkPeer(int32_t rank, int32_t peer, const char* call) const {
  if (peer < 0 || peer >= numRanks() || peer == rank) {
    throw std::invalid_argument("FakeHostNetwork::" + std::string(call) + ": " + rankText(peer) + " is no peer of " + rankText(rank));
  }
}

OperationEvents& FakeHostWorld::checkMessage(int32_t rank, OperationId operation, int32_t peer, const char* call) {
  checkPeer(rank, peer, call);
  if (!hasAddress(rank, peer)) {
    throw std::logic_error("FakeHostNetwork::" + std::string(call) + ": the address of " + rankText(peer) + " is not set at " + rankText(rank));
  }
  const auto found = rankAt(rank).operations.find(operation);
  if (found == rankAt(rank).operations.end()) {
    throw std::logic_error("FakeHostNetwork::" + std::string(call) + ": operation " + operation.str() + " is not open at " + rankText(rank));
  }
  return *found->second;
}

void FakeHostWorld::open(int32_t rank, OperationId operation, OperationEvents& events) {
  Rank& owner = rankAt(rank);
  if (!owner.is_alive) {
    return;
  }
  if (owner.operations.contains(operation) || owner.closed.contains(operation)) {
    throw std::logic_error("FakeHostNetwork::open: operation " + operation.str() + " has been opened before at " + rankText(rank));
  }
  owner.operations.emplace(operation, &events);
}

void FakeHostWorld::send(int32_t rank, OperationId operation, int32_t peer, const void* data, int64_t num_bytes, int64_t cookie) {
  if (!isAlive(rank)) {
    return;
  }
  checkMessage(rank, operation, peer, "send");
  meet(rank, peer);
  streams_[{operation, rank, peer}].sends.push_back({static_cast<char*>(const_cast<void*>(data)), num_bytes, cookie});
  match({operation, rank, peer});
}

void FakeHostWorld::recv(int32_t rank, OperationId operation, int32_t peer, void* data, int64_t num_bytes, int64_t cookie) {
  if (!isAlive(rank)) {
    return;
  }
  checkMessage(rank, operation, peer, "recv");
  meet(rank, peer);
  streams_[{operation, peer, rank}].recvs.push_back({static_cast<char*>(data), num_bytes, cookie});
  match({operation, peer, rank});
}

void FakeHostWorld::close(int32_t rank, OperationId operation) {
  Rank& owner = rankAt(rank);
  if (owner.operations.erase(operation) != 0) {
    owner.closed.insert(operation);
    dropStreams(rank, [operation](OperationId other) { return other == operation; });
  }
}

void FakeHostWorld::dropStreams(int32_t rank, const std::function<bool(OperationId)>& which) {
  for (auto it = streams_.begin(); it != streams_.end();) {
    Stream& stream = it->second;
    if (which(it->first.operation) && it->first.src == rank) {
      stream.sends.clear();
      if (stream.matched) {
        stream.matched->is_aborted = true;
      }
    }
    if (which(it->first.operation) && it->first.dst == rank) {
      stream.recvs.clear();
      if (stream.matched) {
        stream.matched->is_discarded = true;
      }
    }
    it = stream.sends.empty() && stream.recvs.empty() && !stream.matched ? streams_.erase(it) : std::next(it);
  }
}

void FakeHostWorld::sendControl(int32_t rank, int32_t peer, std::string message) {
  if (!isAlive(rank)) {
    return;
  }
  checkPeer(rank, peer, "sendControl");
  if (!hasAddress(rank, peer)) {
    throw std::logic_error("FakeHostNetwork::sendControl: the address of " + rankText(peer) + " is not set at " + rankText(rank));
  }
  meet(rank, peer);
  push({QueueKind::kControl, peer, rank, 0}, [this, rank, peer, message = std::move(message)]() mutable {
    if (!rankAt(peer).lost.contains(rank)) {
      rankAt(peer).events->onControl(rank, std::move(message));
    }
  });
}

uint64_t FakeHostWorld::startTimer(int32_t rank, std::chrono::milliseconds delay, std::function<void()> task) {
  const uint64_t id = next_id_++;
  timers_alive_.insert(id);
  timers_.emplace(std::pair(now_ + std::max(delay, std::chrono::milliseconds(0)), id), std::pair(rank, std::move(task)));
  return id;
}

void FakeHostWorld::setAddress(int32_t rank, int32_t peer, const std::string& address) {
  checkPeer(rank, peer, "setAddress");
  rankAt(rank).addresses[peer] = address;
}

void FakeHostWorld::meet(int32_t rank, int32_t peer) {
  rankAt(rank).contacts.insert(peer);
  rankAt(peer).contacts.insert(rank);
  const Rank& other = rankAt(peer);
  if (other.has_joined && !other.is_alive && isAlive(rank)) {
    const std::string reason = other.said_goodbye ? rankText(peer) + " said goodbye" : "connection reset by peer: " + rankText(peer) + " ended";
    notifyLoss(rank, peer, reason, other.said_goodbye);
  }
}

void FakeHostWorld::notifyLoss(int32_t rank, int32_t lost, const std::string& reason, bool is_goodbye) {
  if (!rankAt(rank).noticed.insert(lost).second) {
    return;
  }
  // Behind the control messages that are on their way.
  push({QueueKind::kControl, rank, lost, 0}, [this, rank, lost, reason, is_goodbye] {
    rankAt(rank).lost.insert(lost);
    rankAt(rank).events->onPeerLost(lost, reason, is_goodbye);
  });
}

void FakeHostWorld::match(const StreamKey& key) {
  Stream& stream = streams_[key];
  if (stream.matched || stream.sends.empty() || stream.recvs.empty()) {
    return;
  }
  if (stream.sends.front().num_bytes != stream.recvs.front().num_bytes) {
    const std::string reason = "protocol error: a message of operation " + key.operation.str() + " from " + rankText(key.src) + " to " +
                               rankText(key.dst) + " has " + std::to_string(stream.sends.front().num_bytes) + " bytes, its receive expects " +
                               std::to_string(stream.recvs.front().num_bytes);
    notifyLoss(key.src, key.dst, reason, false);
    notifyLoss(key.dst, key.src, reason, false);
    return;
  }
  stream.matched = std::make_shared<MatchedMessage>(MatchedMessage{key, stream.sends.front(), stream.recvs.front(), 0, 0, false, false});
  stream.sends.pop_front();
  stream.recvs.pop_front();
  push({QueueKind::kDepart, key.src, key.dst, key.operation}, [this, matched = stream.matched] { depart(matched); });
}

void FakeHostWorld::depart(const std::shared_ptr<MatchedMessage>& matched) {
  const StreamKey& key = matched->key;
  if (matched->is_aborted || rankAt(key.src).lost.contains(key.dst)) {
    return;
  }
  const int64_t left = matched->from.num_bytes - matched->departed_bytes;
  const auto piece_bytes = std::min(left, left / static_cast<int64_t>(1 + random_() % kMaxPieces) + 1);
  std::string piece(matched->from.data + matched->departed_bytes, static_cast<size_t>(piece_bytes));
  matched->departed_bytes += piece_bytes;
  const bool is_last = matched->departed_bytes == matched->from.num_bytes;
  push({QueueKind::kArrive, key.dst, key.src, key.operation},
       [this, matched, piece = std::move(piece), is_last] { arrive(matched, piece, is_last); });
  if (!is_last) {
    push({QueueKind::kDepart, key.src, key.dst, key.operation}, [this, matched] { depart(matched); });
    return;
  }
  const auto owner = rankAt(key.src).operations.find(key.operation);
  if (owner != rankAt(key.src).operations.end()) {
    owner->second->onSent(matched->from.cookie);
  }
}

void FakeHostWorld::arrive(const std::shared_ptr<MatchedMessage>& matched, const std::string& piece, bool is_last) {
  const StreamKey key = matched->key;
  if (!matched->is_discarded && !rankAt(key.dst).lost.contains(key.src) && !piece.empty()) {
    std::memcpy(matched->to.data + matched->arrived_bytes, piece.data(), piece.size());
  }
  matched->arrived_bytes += static_cast<int64_t>(piece.size());
  if (!is_last) {
    return;
  }
  streams_[key].matched = nullptr;
  match(key);
  const auto owner = rankAt(key.dst).operations.find(key.operation);
  if (!matched->is_discarded && owner != rankAt(key.dst).operations.end() && !rankAt(key.dst).lost.contains(key.src)) {
    owner->second->onReceived(matched->to.cookie);
  }
}

}  // namespace xmesh::transport
