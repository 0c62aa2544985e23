#include "runtime/agreement/arrivals.h"

#include <algorithm>
#include <future>
#include <memory>

namespace xmesh::runtime {
namespace {

constexpr size_t kMaxArrivals = 256;

bool isAmong(int64_t rank, const std::vector<int64_t>& ranks) { return std::binary_search(ranks.begin(), ranks.end(), rank); }

}  // namespace

uint64_t Arrivals::arrive(const std::vector<int64_t>& ranks, const std::vector<int32_t>& peers, std::optional<Failure> failure) {
  const std::lock_guard lock(mutex_);
  const uint64_t count = ++num_arrivals_[ranks];
  has_failed_ = has_failed_ || failure.has_value();
  const bool is_open = mailbox_.post([this, peers, arrival = Arrival{0, count, ranks, std::move(failure)}]() mutable {
    arrival.number = ++num_own_;
    own_.push_back({arrival, {}});
    if (own_.size() > kMaxArrivals) {
      own_.pop_front();
    }
    for (const int32_t peer : peers) {
      tell(own_.back(), peer);
    }
  });
  if (!is_open) {
    throw GroupError("the process group is closed: no pipeline can be made on it");
  }
  return count;
}

void Arrivals::tell(OwnArrival& own, int32_t peer) {
  const bool is_concerned = own.arrival.failure.has_value() || isAmong(peers_.globalRank(peer), own.arrival.ranks);
  if (is_concerned && peers_.isReachable(peer) && own.told.insert(peer).second) {
    peers_.tell(peer, encode(own.arrival));
    if (own.arrival.failure.has_value()) {
      unsettled_[peer] = own.arrival.number;
    }
  }
}

std::future<void> Arrivals::settleFailed(const std::vector<int32_t>& peers) {
  auto promise = std::make_shared<std::promise<void>>();
  std::future<void> settled = promise->get_future();
  {
    const std::lock_guard lock(mutex_);
    if (!has_failed_) {
      promise->set_value();
      return settled;
    }
  }
  const bool is_open = mailbox_.post([this, peers, promise] {
    waiter_ = Waiter{std::move(*promise), peers};
    for (const int32_t peer : peers) {
      if (const auto last = unsettled_.find(peer); last != unsettled_.end()) {
        peers_.tell(peer, encode(Return{last->second, false}));
      }
    }
    releaseWaiter();
  });
  if (!is_open) {
    promise->set_value();
  }
  return settled;
}

void Arrivals::hear(int32_t peer, const Return& coming) {
  if (coming.is_answer) {
    if (const auto last = unsettled_.find(peer); last != unsettled_.end() && last->second <= coming.number) {
      unsettled_.erase(last);
    }
    releaseWaiter();
    return;
  }
  std::erase_if(heard_[peer], [&](const Arrival& one) {
    const bool is_over = one.failure.has_value() && one.number <= coming.number;
    if (is_over) {
      countSettled(one);
    }
    return is_over;
  });
  peers_.tell(peer, encode(Return{coming.number, true}));
}

void Arrivals::lose(int32_t peer) {
  unsettled_.erase(peer);
  releaseWaiter();
}

void Arrivals::releaseWaiter() {
  if (waiter_.has_value() && std::none_of(waiter_->peers.begin(), waiter_->peers.end(), [this](int32_t peer) { return unsettled_.contains(peer); })) {
    waiter_->settled.set_value();
    waiter_.reset();
  }
}

void Arrivals::close() {
  unsettled_.clear();
  releaseWaiter();
}

std::optional<Failure> Arrivals::begin(const CallKey& watch, const std::vector<int64_t>& ranks, const std::vector<int32_t>& peers, uint64_t count) {
  const Waiting& here = watches_[watch] = {ranks, count};
  if (std::optional<Failure> conflict = conflictAt(here)) {
    return conflict;
  }
  for (OwnArrival& own : own_) {
    for (const int32_t peer : peers) {
      tell(own, peer);
    }
  }
  return std::nullopt;
}

std::vector<Arrivals::FailedWatch> Arrivals::hear(int32_t peer, Arrival arrival) {
  const CallKey there = pipelineWatch(arrival.ranks, arrival.count);
  if (const Failure* failure = history_.failureOf(there)) {
    peers_.tell(peer, encode(FailNotice{there, *failure, {}}));
  }
  for (OwnArrival& own : own_) {
    tell(own, peer);
  }
  if (settled_.erase({peer, arrival.number}) > 0) {
    countSettled(arrival);
    return {};
  }
  std::deque<Arrival>& heard = heard_[peer];
  heard.push_back(std::move(arrival));
  if (heard.size() > kMaxArrivals) {
    heard.pop_front();
  }
  std::vector<FailedWatch> failed;
  for (const auto& [watch, here] : watches_) {
    if (std::optional<Failure> conflict = conflictAt(here)) {
      failed.emplace_back(watch, std::move(*conflict));
    }
  }
  return failed;
}

bool Arrivals::hasArrived(int32_t peer, const CallKey& watch) const {
  const auto found = watches_.find(watch);
  return found != watches_.end() && hasArrived(peer, found->second);
}

bool Arrivals::hasArrived(int32_t peer, const Waiting& at) const {
  const auto heard = heard_.find(peer);
  return heard != heard_.end() &&
         std::any_of(heard->second.begin(), heard->second.end(), [&](const Arrival& one) { return one.count == at.count && one.ranks == at.ranks; });
}

std::optional<Failure> Arrivals::conflictAt(const Waiting& here) {
  std::optional<Failure> first;
  for (auto& [peer, heard] : heard_) {
    if (!isAmong(peers_.globalRank(peer), here.ranks) || hasArrived(peer, here)) {
      continue;
    }
    std::erase_if(heard, [&, peer = peer](const Arrival& arrival) {
      std::optional<Failure> conflict = conflictOf(arrival, peer, here);
      if (conflict.has_value() && !first.has_value()) {
        first = conflict;
      }
      return conflict.has_value();
    });
  }
  return first;
}

std::optional<Failure> Arrivals::conflictOf(const Arrival& arrival, int32_t peer, const Waiting& here) {
  const bool is_elsewhere = isAmong(peers_.myGlobalRank(), arrival.ranks) && !arrival.failure.has_value();
  {
    const std::lock_guard lock(mutex_);
    if (num_arrivals_[arrival.ranks] >= arrival.count || !(is_elsewhere || arrival.failure.has_value())) {
      return std::nullopt;  // this rank was there, or is not needed there
    }
  }
  countSettled(arrival);
  Failure out{FailureKind::kMistake, {}, {}, -1, -1, 0, peer, arrival.number};
  const std::string their_rank = "rank " + std::to_string(peers_.globalRank(peer));
  const std::string my_rank = "rank " + std::to_string(peers_.myGlobalRank());
  if (arrival.failure.has_value()) {
    out.kind = arrival.failure->kind;
    out.text = arrival.failure->text;
  } else if (arrival.ranks == here.ranks) {
    out.text = "ranks disagree on how many pipelines of ranks " + rankList(here.ranks) + " they have made: " + their_rank + " makes number " +
               std::to_string(arrival.count) + ", " + my_rank + " number " + std::to_string(here.count);
  } else {
    out.text = "ranks disagree on meshes: " + their_rank + " makes a pipeline of ranks " + rankList(arrival.ranks) + ", " + my_rank +
               " one of ranks " + rankList(here.ranks);
  }
  return out;
}

void Arrivals::settle(const CallKey& call, const Failure& failure) {
  const int32_t peer = failure.arrived_peer;
  if (peer < 0 || peer == peers_.groupRank()) {
    return;
  }
  failed_by_.emplace(peer, failure.arrival);
  std::vector<CallKey> others;
  for (const auto& [key, news] : history_.early()) {
    if (key != call && news.failure.has_value() && news.failure->arrived_peer == peer && news.failure->arrival == failure.arrival) {
      others.push_back(key);
    }
  }
  for (const CallKey& other : others) {
    history_.takeNews(other);
    passOver(other);
  }
  std::deque<Arrival>& heard = heard_[peer];
  const auto found = std::find_if(heard.begin(), heard.end(), [&](const Arrival& one) { return one.number == failure.arrival; });
  if (found == heard.end()) {
    settled_.emplace(peer, failure.arrival);
    return;
  }
  countSettled(*found);
  heard.erase(found);
}

void Arrivals::passOver(const CallKey& watch) {
  for (auto& [peer, heard] : heard_) {
    std::erase_if(heard, [&](const Arrival& one) {
      const bool is_there = pipelineWatch(one.ranks, one.count) == watch;
      if (is_there) {
        countSettled(one);
      }
      return is_there;
    });
  }
}

std::optional<Arrivals::FailedWatch> Arrivals::takeBlame(const FailNotice& notice) {
  passOver(notice.key);
  const auto own = std::find_if(own_.begin(), own_.end(), [&](const OwnArrival& one) { return one.arrival.number == notice.failure.arrival; });
  if (own == own_.end() || own->arrival.failure.has_value()) {
    return std::nullopt;
  }
  const CallKey watch = pipelineWatch(own->arrival.ranks, own->arrival.count);
  if (watches_.contains(watch)) {
    return FailedWatch{watch, notice.failure};
  }
  if (EarlyNews* news = history_.newsFor(watch)) {
    news->failure = notice.failure;
  }
  return std::nullopt;
}

void Arrivals::countSettled(const Arrival& arrival) {
  const bool is_outside = arrival.failure.has_value() && !arrival.ranks.empty();
  if (is_outside || (!arrival.ranks.empty() && !isAmong(peers_.myGlobalRank(), arrival.ranks))) {
    return;
  }
  const std::lock_guard lock(mutex_);
  uint64_t& mine = num_arrivals_[arrival.ranks];
  mine = std::max(mine, arrival.count);
}

std::optional<Failure> Arrivals::failureBefore(const std::vector<int64_t>& ranks, uint64_t count) {
  auto answer = std::make_shared<std::promise<std::optional<Failure>>>();
  std::future<std::optional<Failure>> told = answer->get_future();
  const bool is_open = mailbox_.post([this, ranks, count, answer] {
    const CallKey watch = pipelineWatch(ranks, count);
    if (const auto early = history_.early().find(watch); early != history_.early().end() && early->second.failure.has_value()) {
      answer->set_value(early->second.failure);
      return;
    }
    for (const auto& [peer, lost] : peers_.lost()) {
      if (isAmong(peers_.globalRank(peer), ranks)) {
        answer->set_value(Failure{FailureKind::kPeer,
                                  "on rank " + std::to_string(peers_.myGlobalRank()) + ", a pipeline of ranks " + rankList(ranks) +
                                      " cannot be made: rank " + std::to_string(peers_.globalRank(peer)) + " is lost (" + lost.reason + ")",
                                  lost.blamed_ranks});
        return;
      }
    }
    answer->set_value(conflictAt({ranks, count}));
  });
  answer.reset();
  Failure closed{FailureKind::kGroup, "the process group was closed while a pipeline was made on it", {}};
  if (!is_open) {
    return closed;
  }
  try {
    return told.get();
  } catch (const std::future_error&) {  // closed before the task ran
    return closed;
  }
}

void Arrivals::abandon(const std::vector<int64_t>& ranks, uint64_t count, const std::vector<int32_t>& peers, const Failure& failure) {
  mailbox_.post([this, watch = pipelineWatch(ranks, count), peers, failure] {
    history_.takeNews(watch);
    history_.fail(watch, failure);
    peers_.tell(peers, encode(FailNotice{watch, failure, {}}));
  });
}

}  // namespace xmesh::runtime
