#include <algorithm>
#include <utility>

#include "runtime/reshard_service.h"

// Refusals of calls that cannot be named, for their participants are not known: a plain tensor has no mesh, an empty list has no tensors.
//
// A rank's calls and refusals are in the order of its program, so that the n-th of one rank meets the n-th of another. A refusal that may be of a
// call of some participants (all that is known of it are ranks of theirs) thus counts as one of their calls, once this rank makes its next call with
// them: where all of them refused alike, all count alike. Where one of them did make the call, it asks; that names the refusal, which is then of no
// other call. A rank about to call with open refusals therefore waits until each participant has refused as often, or asks about that very call.
//
// What cannot be known: if only some ranks of a call refuse it, and these then call with others who were to have no part in it, these others cannot
// tell that from a call of their own that was refused. They fail with the refusal's text.

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

void ReshardService::refuse(const std::vector<int64_t>& participants, const std::vector<int32_t>& peers, const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (is_closed_) {
    return;
  }
  const uint64_t hash = hashRanks(participants);
  countRefusals(participants, hash);
  const CallKey key{hash, 0, next_count_[hash]++};
  network_->post([this, key, participants, peers, text] {
    const Failure failure = refusalOf(globalRank(options_.group_rank), text);
    takeRefused(key, failure);
    last_call_ = "reshard call " + std::to_string(key.count) + ", which it refused: " + text;
    for (const int32_t peer : peers) {
      if (peer != options_.group_rank && !lost_.contains(peer) && network_->hasAddress(peer)) {
        network_->sendControl(peer, encode(FailNotice{key, failure, participants}));
      }
    }
  });
}

void ReshardService::refuseUnnamed(const std::vector<int64_t>& ranks, const std::vector<int32_t>& peers, const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (is_closed_) {
    return;
  }
  if (refusals_.size() == kMaxRefusals) {
    refusals_.pop_front();
  }
  refusals_.push_back({refusalOf(globalRank(options_.group_rank), text), ranks, {}});
  network_->post([this, peers, text] {
    last_call_ = "a reshard that it refused: " + text;
    told_.insert(peers.begin(), peers.end());
    tellRefusals();
    nameByEarlyFailures();
  });
}

void ReshardService::nameByEarlyFailures() {
  std::vector<std::pair<CallKey, std::vector<int64_t>>> found;
  for (const auto& [key, news] : early_) {
    if (news.failure.has_value() && news.failure->kind == FailureKind::kMistake && !news.participants.empty()) {
      found.emplace_back(key, news.participants);
    }
  }
  for (const auto& [key, participants] : found) {
    nameRefusals(key, participants);
  }
}

void ReshardService::takeRefused(const CallKey& key, const Failure& failure) {
  started_[key.participants] = key.count + 1;
  remember(key, failure);
  const auto early = early_.find(key);
  if (early == early_.end()) {
    return;
  }
  for (const auto& [peer, hello] : early->second.hellos) {
    network_->sendControl(peer, encode(FailNotice{key, failure, {}}));
  }
  early_.erase(early);
}

void ReshardService::countRefusals(const std::vector<int64_t>& participants, uint64_t hash) {
  for (OwnRefusal& refusal : refusals_) {
    if (mayBeOf(refusal.ranks, participants) && !refusal.counted.contains(hash)) {
      const CallKey key{hash, 0, next_count_[hash]++};
      refusal.counted.emplace(hash, key);
      network_->post([this, key, failure = refusal.failure] { takeRefused(key, failure); });
    }
  }
}

uint64_t ReshardService::numUncounted(const std::vector<int64_t>& participants, uint64_t hash) const {
  return static_cast<uint64_t>(std::count_if(refusals_.begin(), refusals_.end(), [&](const OwnRefusal& refusal) {
    return mayBeOf(refusal.ranks, participants) && !refusal.counted.contains(hash);
  }));
}

size_t ReshardService::numRefusals() {
  const std::lock_guard lock(mutex_);
  return refusals_.size();
}

void ReshardService::tellRefusals() {
  for (const int32_t peer : told_) {
    tellRefusals(peer);
  }
}

void ReshardService::tellRefusals(int32_t peer) {
  told_.insert(peer);
  if (peer != options_.group_rank && !lost_.contains(peer) && network_->hasAddress(peer)) {
    network_->sendControl(peer, encode(UnnamedRefusals{numRefusals()}));
  }
}

void ReshardService::nameRefusals(const CallKey& key, const std::vector<int64_t>& participants) {
  std::vector<std::pair<CallKey, Failure>> refused;
  bool is_named = false;
  {
    const std::lock_guard lock(mutex_);
    if (key.lane != 0 || refusals_.empty()) {
      return;
    }
    uint64_t& next = next_count_[key.participants];
    if (key.count >= next + numUncounted(participants, key.participants)) {
      return;  // of a call that is still to come
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
    takeRefused(call, failure);
  }
  if (is_named) {
    tellRefusals();
  }
  releaseWaiter();
}

void ReshardService::takeUnnamedRefusals(int32_t peer, const UnnamedRefusals& refusals) {
  unnamed_[peer] = refusals.count;
  if (!told_.contains(peer) && numRefusals() > 0) {
    tellRefusals(peer);
  }
  for (const auto& [key, call] : calls_) {
    askAboutRefusals(key, call, peer);
  }
  releaseWaiter();
}

void ReshardService::askAboutRefusals(const CallKey& key, const ActiveCall& call, int32_t peer) {
  const auto heard = unnamed_.find(peer);
  if (heard == unnamed_.end() || key.lane != 0 || call.request.key.has_value() || heard->second <= numRefusals()) {
    return;
  }
  const std::vector<int64_t>& participants = call.request.prepared->participants;
  if (std::binary_search(participants.begin(), participants.end(), globalRank(peer))) {
    network_->sendControl(peer, encode(Question{key, participants}));
  }
}

std::future<void> ReshardService::settleRefusals(const std::shared_ptr<const PreparedPlan>& prepared) {
  auto promise = std::make_shared<std::promise<void>>();
  std::future<void> settled = promise->get_future();
  const std::lock_guard lock(mutex_);
  if (is_closed_ || numUncounted(prepared->participants, prepared->participants_hash) == 0) {
    promise->set_value();
    return settled;
  }
  network_->post([this, prepared, promise = std::move(promise)] {
    waiter_ = Waiter{promise, prepared};
    for (const int32_t peer : prepared->participant_peers) {
      if (!told_.contains(peer)) {
        tellRefusals(peer);
      }
    }
    releaseWaiter();
  });
  return settled;
}

void ReshardService::releaseWaiter() {
  if (!waiter_.has_value()) {
    return;
  }
  const PreparedPlan& prepared = *waiter_->prepared;
  uint64_t num_uncounted = 0;
  uint64_t num_refusals = 0;
  CallKey next{prepared.participants_hash, 0, 0};
  {
    const std::lock_guard lock(mutex_);
    num_uncounted = numUncounted(prepared.participants, prepared.participants_hash);
    num_refusals = refusals_.size();
    next.count = next_count_[prepared.participants_hash] + num_uncounted;
  }
  const auto is_known = [&](int32_t peer) {
    const auto heard = unnamed_.find(peer);
    const auto asked = asked_.find(peer);
    return peer == options_.group_rank || lost_.contains(peer) || (heard != unnamed_.end() && heard->second >= num_refusals) ||
           (asked != asked_.end() && asked->second == next);
  };
  const std::vector<int32_t>& peers = prepared.participant_peers;
  if (num_uncounted == 0 || std::all_of(peers.begin(), peers.end(), is_known)) {
    waiter_->settled->set_value();
    waiter_.reset();
  }
}

}  // namespace xmesh::runtime
