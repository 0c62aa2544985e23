// The ranks of a pipeline arrive one by one, and may not agree on who they are. Each counts the pipelines of each set of ranks that it makes, and
// tells those ranks: "my second one of [0, 1, 2]". Where no two disagree, their counts are equal. A rank that waits at one pipeline for another,
// which has not arrived there, knows that it will not come if that one waits for it at a pipeline that it has not made, or could make none.
#include <algorithm>
#include <future>
#include <utility>

#include "runtime/reshard_service.h"

namespace xmesh::runtime {
namespace {

constexpr size_t kMaxArrivals = 256;

bool isAmong(int64_t rank, const std::vector<int64_t>& ranks) { return std::binary_search(ranks.begin(), ranks.end(), rank); }

}  // namespace

uint64_t ReshardService::arrive(const std::vector<int64_t>& ranks, const std::vector<int32_t>& peers, const std::string& address,
                                std::optional<Failure> failure) {
  const std::lock_guard lock(mutex_);
  if (is_closed_) {
    throw GroupError("the process group is closed: no pipeline can be made on it");
  }
  const uint64_t count = ++num_arrivals_[ranks];
  network_->post([this, peers, arrival = Arrival{0, count, ranks, std::move(failure), address}]() mutable {
    arrival.number = ++num_own_arrivals_;
    own_arrivals_.push_back({arrival, {}});
    if (own_arrivals_.size() > kMaxArrivals) {
      own_arrivals_.pop_front();
    }
    for (const int32_t peer : peers) {
      tellArrival(own_arrivals_.back(), peer);
    }
  });
  return count;
}

void ReshardService::tellArrival(OwnArrival& own, int32_t peer) {
  const bool is_concerned = own.arrival.failure.has_value() || isAmong(globalRank(peer), own.arrival.ranks);
  if (peer != options_.group_rank && is_concerned && !lost_.contains(peer) && network_->hasAddress(peer) && own.told.insert(peer).second) {
    network_->sendControl(peer, encode(own.arrival));
  }
}

void ReshardService::takeArrival(int32_t peer, Arrival arrival) {
  if (!network_->hasAddress(peer)) {
    network_->setAddress(peer, arrival.address);
  }
  if (const auto failed = failed_.find(pipelineWatch(arrival.ranks, arrival.count)); failed != failed_.end()) {
    network_->sendControl(peer, encode(FailNotice{failed->first, failed->second, {}}));
  }
  for (OwnArrival& own : own_arrivals_) {
    tellArrival(own, peer);
  }
  if (settled_.erase({peer, arrival.number}) > 0) {
    countSettled(arrival);
    return;
  }
  std::deque<Arrival>& heard = arrivals_[peer];
  heard.push_back(std::move(arrival));
  if (heard.size() > kMaxArrivals) {
    heard.pop_front();
  }
  checkArrivals();
}

void ReshardService::checkArrivals() {
  std::vector<CallKey> waiting;
  for (const auto& [key, call] : calls_) {
    if (call.request.arrival > 0) {
      waiting.push_back(key);
    }
  }
  for (const CallKey& key : waiting) {
    if (const auto found = calls_.find(key); found != calls_.end()) {
      const CallRequest& request = found->second.request;
      if (const std::optional<Failure> conflict = arrivalConflict(request.prepared->participants, request.arrival)) {
        fail(key, *conflict, true);
      }
    }
  }
}

bool ReshardService::hasArrived(int32_t peer, const std::vector<int64_t>& ranks, uint64_t count) const {
  const auto heard = arrivals_.find(peer);
  return heard != arrivals_.end() &&
         std::any_of(heard->second.begin(), heard->second.end(), [&](const Arrival& one) { return one.count == count && one.ranks == ranks; });
}

std::optional<Failure> ReshardService::arrivalConflict(const std::vector<int64_t>& ranks, uint64_t count) {
  std::optional<Failure> first;
  for (auto& [peer, heard] : arrivals_) {
    if (!isAmong(globalRank(peer), ranks) || hasArrived(peer, ranks, count)) {
      continue;
    }
    std::erase_if(heard, [&, peer = peer](const Arrival& arrival) {
      std::optional<Failure> conflict = conflictOf(arrival, peer, ranks, count);
      if (conflict.has_value() && !first.has_value()) {
        first = conflict;
      }
      return conflict.has_value();
    });
  }
  return first;
}

std::optional<Failure> ReshardService::conflictOf(const Arrival& arrival, int32_t peer, const std::vector<int64_t>& ranks, uint64_t count) {
  const bool is_elsewhere = isAmong(globalRank(options_.group_rank), arrival.ranks) && !arrival.failure.has_value();
  {
    const std::lock_guard lock(mutex_);
    if (num_arrivals_[arrival.ranks] >= arrival.count || !(is_elsewhere || arrival.failure.has_value())) {
      return std::nullopt;  // this rank was there, or is not needed there
    }
  }
  countSettled(arrival);
  Failure out{FailureKind::kMistake, {}, {}, -1, -1, 0, peer, arrival.number};
  const std::string there = "rank " + std::to_string(globalRank(peer));
  const std::string here = "rank " + std::to_string(globalRank(options_.group_rank));
  if (arrival.failure.has_value()) {
    out.kind = arrival.failure->kind;
    out.text = arrival.failure->text;
  } else if (arrival.ranks == ranks) {
    out.text = "ranks disagree on how many pipelines of ranks " + rankList(ranks) + " they have made: " + there + " makes number " +
               std::to_string(arrival.count) + ", " + here + " number " + std::to_string(count);
  } else {
    out.text = "ranks disagree on meshes: " + there + " makes a pipeline of ranks " + rankList(arrival.ranks) + ", " + here + " one of ranks " +
               rankList(ranks);
  }
  return out;
}

void ReshardService::settleArrival(int32_t peer, uint64_t number) {
  if (peer < 0 || peer == options_.group_rank) {
    return;
  }
  std::deque<Arrival>& heard = arrivals_[peer];
  const auto found = std::find_if(heard.begin(), heard.end(), [number](const Arrival& one) { return one.number == number; });
  if (found == heard.end()) {
    settled_.emplace(peer, number);
    return;
  }
  countSettled(*found);
  heard.erase(found);
}

void ReshardService::takeBlame(const FailNotice& notice) {
  for (auto& [peer, heard] : arrivals_) {
    std::erase_if(heard, [&](const Arrival& one) {
      const bool is_there = pipelineWatch(one.ranks, one.count) == notice.key;
      if (is_there) {
        countSettled(one);
      }
      return is_there;
    });
  }
  const auto own =
      std::find_if(own_arrivals_.begin(), own_arrivals_.end(), [&](const OwnArrival& one) { return one.arrival.number == notice.failure.arrival; });
  if (own == own_arrivals_.end() || own->arrival.failure.has_value()) {
    return;
  }
  const CallKey watch = pipelineWatch(own->arrival.ranks, own->arrival.count);
  if (calls_.contains(watch)) {
    fail(watch, notice.failure, true);
  } else if (!isPast(watch)) {
    early_[watch].failure = notice.failure;
  }
}

/// This rank's part in that pipeline has failed with it: the next one that both make has the same number on both.
void ReshardService::countSettled(const Arrival& arrival) {
  const bool is_outside = arrival.failure.has_value() && !arrival.ranks.empty();
  if (is_outside || (!arrival.ranks.empty() && !isAmong(globalRank(options_.group_rank), arrival.ranks))) {
    return;
  }
  const std::lock_guard lock(mutex_);
  uint64_t& mine = num_arrivals_[arrival.ranks];
  mine = std::max(mine, arrival.count);
}

std::optional<Failure> ReshardService::arrivalFailure(const std::vector<int64_t>& ranks, uint64_t count) {
  auto answer = std::make_shared<std::promise<std::optional<Failure>>>();
  std::future<std::optional<Failure>> told = answer->get_future();
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_) {
      return Failure{FailureKind::kGroup, "the process group was closed while a pipeline was made on it", {}};
    }
    network_->post([this, ranks, count, answer] {
      if (const auto early = early_.find(pipelineWatch(ranks, count)); early != early_.end() && early->second.failure.has_value()) {
        answer->set_value(early->second.failure);
        return;
      }
      for (const auto& [peer, lost] : lost_) {
        if (isAmong(globalRank(peer), ranks)) {
          answer->set_value(Failure{FailureKind::kPeer,
                                    "on rank " + std::to_string(globalRank(options_.group_rank)) + ", a pipeline of ranks " + rankList(ranks) +
                                        " cannot be made: rank " + std::to_string(globalRank(peer)) + " is lost (" + lost.reason + ")",
                                    lost.blamed_ranks});
          return;
        }
      }
      answer->set_value(arrivalConflict(ranks, count));
    });
  }
  return told.get();
}

void ReshardService::abandonArrival(const std::vector<int64_t>& ranks, uint64_t count, const std::vector<int32_t>& peers, const Failure& failure) {
  const std::lock_guard lock(mutex_);
  if (is_closed_) {
    return;
  }
  network_->post([this, key = pipelineWatch(ranks, count), peers, failure] {
    early_.erase(key);
    remember(key, failure);
    for (const int32_t peer : peers) {
      if (peer != options_.group_rank && !lost_.contains(peer) && network_->hasAddress(peer)) {
        network_->sendControl(peer, encode(FailNotice{key, failure, {}}));
      }
    }
  });
}

}  // namespace xmesh::runtime
