#include <algorithm>
#include <utility>

#include "runtime/reshard_service.h"

namespace xmesh::runtime {
namespace {

Failure refusalOf(int64_t global_rank, const std::string& text) {
  return {FailureKind::kMistake, "rank " + std::to_string(global_rank) + " refused this call: " + text, {}};
}

}  // namespace

void ReshardService::refuse(const std::vector<int64_t>& participants, const std::vector<int32_t>& peers, const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (is_closed_) {
    return;
  }
  const uint64_t hash = hashRanks(participants);
  const CallKey key{hash, 0, next_count_[hash]++};
  network_->post([this, key, peers, text] {
    started_[key.participants] = key.count + 1;
    const Failure failure = refusalOf(globalRank(options_.group_rank), text);
    early_.erase(key);
    remember(key, failure);
    last_call_ = "reshard call " + std::to_string(key.count) + ", which it refused: " + text;
    for (const int32_t peer : peers) {
      if (peer != options_.group_rank && !lost_.contains(peer) && network_->hasAddress(peer)) {
        network_->sendControl(peer, encode(FailNotice{key, failure}));
      }
    }
  });
}

void ReshardService::refuseUnnamed(const std::vector<int64_t>& ranks, const std::vector<int32_t>& peers, const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (is_closed_) {
    return;
  }
  ++num_open_refusals_;
  network_->post([this, ranks, peers, text] {
    if (open_refusal_.has_value()) {
      settleOpenRefusal();  // nobody asked about it
    }
    last_call_ = "a reshard that it refused: " + text;
    open_refusal_ = OpenRefusal{refusalOf(globalRank(options_.group_rank), text), {++num_unnamed_, ranks}, {}, nullptr};
    for (const int32_t peer : peers) {
      if (peer != options_.group_rank && !lost_.contains(peer) && network_->hasAddress(peer)) {
        tellOpenRefusal(peer);
      }
    }
    if (std::any_of(unnamed_.begin(), unnamed_.end(), [this](const auto& heard) { return heard.second.count >= num_unnamed_; })) {
      settleOpenRefusal();
    }
  });
}

void ReshardService::tellOpenRefusal(int32_t peer) {
  open_refusal_->told.insert(peer);
  network_->sendControl(peer, encode(open_refusal_->notice));
}

void ReshardService::settleOpenRefusal() {
  const std::shared_ptr<std::promise<void>> waiter = open_refusal_->waiter;
  open_refusal_.reset();
  {
    const std::lock_guard lock(mutex_);
    --num_open_refusals_;
  }
  if (waiter != nullptr) {
    waiter->set_value();
  }
}

bool ReshardService::nameOpenRefusal(const CallKey& key) {
  if (!open_refusal_.has_value() || key.lane != 0 || isPast(key)) {
    return false;
  }
  {
    const std::lock_guard lock(mutex_);
    uint64_t& next_count = next_count_[key.participants];
    if (next_count != key.count) {
      return false;
    }
    ++next_count;
  }
  started_[key.participants] = key.count + 1;
  early_.erase(key);
  remember(key, open_refusal_->failure);
  settleOpenRefusal();
  return true;
}

bool ReshardService::mayBeOf(const UnnamedRefusal& refusal, const std::vector<int64_t>& participants) {
  return std::includes(participants.begin(), participants.end(), refusal.ranks.begin(), refusal.ranks.end());
}

void ReshardService::takeUnnamedRefusal(int32_t peer, UnnamedRefusal refusal) {
  const UnnamedRefusal& heard = unnamed_[peer] = std::move(refusal);
  if (open_refusal_.has_value()) {
    if (!open_refusal_->told.contains(peer)) {
      tellOpenRefusal(peer);
    }
    if (heard.count >= open_refusal_->notice.count) {
      settleOpenRefusal();
    }
  }
  for (const auto& [key, call] : calls_) {
    askAboutRefusal(key, call, peer);
  }
}

void ReshardService::askAboutRefusal(const CallKey& key, const ActiveCall& call, int32_t peer) {
  const auto heard = unnamed_.find(peer);
  if (heard == unnamed_.end() || heard->second.count <= num_unnamed_ || key.lane != 0 || call.request.key.has_value()) {
    return;
  }
  const std::vector<int64_t>& participants = call.request.prepared->participants;
  if (std::binary_search(participants.begin(), participants.end(), globalRank(peer)) && mayBeOf(heard->second, participants)) {
    network_->sendControl(peer, encode(Question{key, num_unnamed_}));
  }
}

void ReshardService::awaitOpenRefusal(const CallRequest& request) {
  if (request.key.has_value() || request.lane != 0) {
    return;
  }
  std::future<void> settled;
  {
    const std::lock_guard lock(mutex_);
    if (num_open_refusals_ == 0 || is_closed_) {
      return;
    }
    auto waiter = std::make_shared<std::promise<void>>();
    settled = waiter->get_future();
    network_->post([this, waiter = std::move(waiter), prepared = request.prepared] {
      if (!open_refusal_.has_value() || !mayBeOf(open_refusal_->notice, prepared->participants)) {
        waiter->set_value();
        return;
      }
      open_refusal_->waiter = waiter;
      const auto early = early_.lower_bound({prepared->participants_hash, 0, 0});
      if (early != early_.end() && early->first.participants == prepared->participants_hash && early->second.failure.has_value()) {
        nameOpenRefusal(CallKey(early->first));  // others refused it too, or have heard of this refusal
      }
    });
  }
  if (request.timeout.count() > 0) {
    settled.wait_for(request.timeout);
  } else {
    settled.wait();
  }
}

}  // namespace xmesh::runtime
