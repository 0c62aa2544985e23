#include "runtime/agreement/refusals.h"

#include <algorithm>
#include <utility>

namespace xmesh::runtime {
namespace {

constexpr size_t kMaxRefusals = 1024;

Failure refusalOf(int64_t global_rank, const std::string& text) {
  return {FailureKind::kMistake, "rank " + std::to_string(global_rank) + " refused this call: " + text, {}};
}

bool mayBeOf(const std::vector<int64_t>& ranks, const std::vector<int64_t>& participants) {
  return std::includes(participants.begin(), participants.end(), ranks.begin(), ranks.end());
}

}  // namespace

CallKey Refusals::next(const Participants& participants) {
  const std::lock_guard lock(mutex_);
  if (!refusals_.empty()) {
    count(participants.ranks, participants.hash);
  }
  return {participants.hash, 0, next_count_[participants.hash]++};
}

void Refusals::refuse(const std::vector<int64_t>& participants, const std::vector<int32_t>& peers, const std::string& text) {
  const std::lock_guard lock(mutex_);
  const uint64_t hash = hashRanks(participants);
  count(participants, hash);
  const CallKey key{hash, 0, next_count_[hash]++};
  mailbox_.post([this, key, participants, peers, text] {
    const Failure failure = refusalOf(peers_.myGlobalRank(), text);
    take(key, failure);
    history_.setLastCall("reshard call " + std::to_string(key.count) + ", which it refused: " + text);
    peers_.tell(peers, encode(FailNotice{key, failure, participants}));
  });
}

void Refusals::refuseUnnamed(const std::vector<int64_t>& ranks, const std::vector<int32_t>& peers, const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (refusals_.size() == kMaxRefusals) {
    refusals_.pop_front();
  }
  refusals_.push_back({refusalOf(peers_.myGlobalRank(), text), ranks, {}});
  mailbox_.post([this, peers, text] {
    history_.setLastCall("a reshard that it refused: " + text);
    told_.insert(peers.begin(), peers.end());
    tellAll();
    nameByEarlyFailures();
  });
}

void Refusals::nameByEarlyFailures() {
  std::vector<std::pair<CallKey, std::vector<int64_t>>> found;
  for (const auto& [key, news] : history_.early()) {
    if (news.failure.has_value() && news.failure->kind == FailureKind::kMistake && !news.participants.empty()) {
      found.emplace_back(key, news.participants);
    }
  }
  for (const auto& [key, participants] : found) {
    name(key, participants);
  }
}

void Refusals::take(const CallKey& key, const Failure& failure) {
  history_.start(key);
  history_.fail(key, failure);
  for (const auto& [peer, notice] : history_.takeNews(key).notices) {
    peers_.tell(peer, encode(FailNotice{key, failure, {}}));
  }
}

void Refusals::count(const std::vector<int64_t>& participants, uint64_t hash) {
  for (Refusal& refusal : refusals_) {
    if (mayBeOf(refusal.ranks, participants) && !refusal.counted.contains(hash)) {
      const CallKey key{hash, 0, next_count_[hash]++};
      refusal.counted.emplace(hash, key);
      mailbox_.post([this, key, failure = refusal.failure] { take(key, failure); });
    }
  }
}

uint64_t Refusals::numUncounted(const std::vector<int64_t>& participants, uint64_t hash) const {
  return static_cast<uint64_t>(std::count_if(refusals_.begin(), refusals_.end(), [&](const Refusal& refusal) {
    return mayBeOf(refusal.ranks, participants) && !refusal.counted.contains(hash);
  }));
}

size_t Refusals::size() {
  const std::lock_guard lock(mutex_);
  return refusals_.size();
}

void Refusals::tellAll() {
  for (const int32_t peer : told_) {
    tell(peer);
  }
}

void Refusals::tell(int32_t peer) {
  told_.insert(peer);
  peers_.tell(peer, encode(UnnamedRefusals{size()}));
}

void Refusals::tellOnce(int32_t peer) {
  if (!told_.contains(peer) && size() > 0) {
    tell(peer);
  }
}

void Refusals::name(const CallKey& key, const std::vector<int64_t>& participants) {
  std::vector<std::pair<CallKey, Failure>> refused;
  bool is_named = false;
  {
    const std::lock_guard lock(mutex_);
    if (key.lane != 0 || refusals_.empty()) {
      return;
    }
    uint64_t& next = next_count_[key.participants];
    if (key.count >= next + numUncounted(participants, key.participants)) {
      return;  // it belongs to a call that is still to come
    }
    for (auto refusal = refusals_.begin(); refusal != refusals_.end() && !is_named;) {
      auto counted = refusal->counted.find(key.participants);
      if (counted == refusal->counted.end() && mayBeOf(refusal->ranks, participants) && next <= key.count) {
        counted = refusal->counted.emplace(key.participants, CallKey{key.participants, 0, next++}).first;
        refused.emplace_back(counted->second, refusal->failure);
      }
      is_named = counted != refusal->counted.end() && counted->second == key;
      refusal = is_named ? refusals_.erase(refusal) : std::next(refusal);
    }
  }
  for (const auto& [call, failure] : refused) {
    take(call, failure);
  }
  if (is_named) {
    tellAll();
  }
  releaseWaiter();
}

void Refusals::hear(int32_t peer, const UnnamedRefusals& refusals) {
  unnamed_[peer] = refusals.count;
  tellOnce(peer);
  releaseWaiter();
}

void Refusals::ask(const CallKey& key, const Participants& participants, int32_t peer) {
  const auto heard = unnamed_.find(peer);
  if (key.lane == 0 && heard != unnamed_.end() && heard->second > size() && participants.contains(peers_.globalRank(peer))) {
    peers_.tell(peer, encode(Question{key, participants.ranks}));
  }
}

void Refusals::heardQuestion(int32_t peer, const Question& question) {
  name(question.key, question.participants);
  if (question.key.lane == 0) {
    asked_[peer] = question.key;
    releaseWaiter();
  }
}

std::future<void> Refusals::settle(const Participants& participants) {
  auto promise = std::make_shared<std::promise<void>>();
  std::future<void> settled = promise->get_future();
  {
    const std::lock_guard lock(mutex_);
    if (numUncounted(participants.ranks, participants.hash) == 0) {
      promise->set_value();
      return settled;
    }
  }
  const bool is_open = mailbox_.post([this, participants, promise] {
    waiter_ = Waiter{promise, participants};
    for (const int32_t peer : participants.peers) {
      if (!told_.contains(peer)) {
        tell(peer);
      }
    }
    releaseWaiter();
  });
  if (!is_open) {
    promise->set_value();
  }
  return settled;
}

void Refusals::releaseWaiter(bool is_closed) {
  if (!waiter_.has_value()) {
    return;
  }
  const Participants& participants = waiter_->participants;
  uint64_t num_uncounted = 0;
  uint64_t num_refusals = 0;
  CallKey next{participants.hash, 0, 0};
  {
    const std::lock_guard lock(mutex_);
    num_uncounted = numUncounted(participants.ranks, participants.hash);
    num_refusals = refusals_.size();
    next.count = next_count_[participants.hash] + num_uncounted;
  }
  const auto is_known = [&](int32_t peer) {
    const auto heard = unnamed_.find(peer);
    const auto asked = asked_.find(peer);
    return peer == peers_.groupRank() || peers_.isLost(peer) || (heard != unnamed_.end() && heard->second >= num_refusals) ||
           (asked != asked_.end() && asked->second == next);
  };
  if (is_closed || num_uncounted == 0 || std::all_of(participants.peers.begin(), participants.peers.end(), is_known)) {
    waiter_->settled->set_value();
    waiter_.reset();
  }
}

}  // namespace xmesh::runtime
