#include <algorithm>
#include <utility>

#include "runtime/reshard_service.h"

namespace xmesh::runtime {
namespace {

constexpr std::chrono::milliseconds kAnswerTime{2000};
constexpr size_t kMaxFailed = 4096;

}  // namespace

void ReshardService::fail(const CallKey& key, const Failure& failure, bool tell) {
  const auto found = calls_.find(key);
  if (found == calls_.end()) {
    return;
  }
  ActiveCall call = std::move(found->second);
  calls_.erase(found);
  remember(key, failure);
  network_->cancelTimer(call.timer);
  if (call.executor != nullptr) {
    call.executor->cancel();
  }
  if (tell) {
    for (const int32_t peer : call.request.prepared->participant_peers) {
      if (peer != options_.group_rank && !lost_.contains(peer)) {
        network_->sendControl(peer, encode(FailNotice{key, failure, call.request.prepared->participants}));
      }
    }
  }
  failWithWatch(key, call, failure);
  end(call, failure);
}

bool ReshardService::joinWatch(const CallKey& key, ActiveCall& call) {
  if (!call.request.watch.has_value()) {
    return true;
  }
  const CallKey watch = *call.request.watch;
  if (const auto found = calls_.find(watch); found != calls_.end()) {
    ActiveCall& joined = found->second;
    joined.watched.insert(key);
    joined.turn = std::max(joined.turn, call.request.turn);
    if (!joined.coming_failure.has_value() || joined.coming_failure->turn > joined.turn) {
      return true;
    }
    fail(watch, Failure(*joined.coming_failure), true);
    return false;
  }
  const auto failed = failed_.find(watch);
  fail(key, failed != failed_.end() ? failed->second : Failure{FailureKind::kGroup, callText(key, call) + ": what it belongs to is closed", {}},
       false);
  return false;
}

/// A call takes its watch along, a watch all its calls.
void ReshardService::failWithWatch(const CallKey& key, const ActiveCall& call, const Failure& failure) {
  if (call.request.watch.has_value()) {
    if (const auto watch = calls_.find(*call.request.watch); watch != calls_.end()) {
      watch->second.watched.erase(key);
      fail(*call.request.watch, failure, true);
    }
  }
  for (const CallKey& watched : call.watched) {
    fail(watched, failure, false);
  }
}

void ReshardService::takeFailNotice(int32_t peer, FailNotice notice) {
  if (notice.failure.kind == FailureKind::kPeer) {
    peer_failures_[peer] = notice.failure;
  }
  if (notice.failure.arrived_peer == options_.group_rank && !calls_.contains(notice.key)) {
    takeBlame(notice);  // a pipeline at which this rank was not
    return;
  }
  settleArrival(notice.failure.arrived_peer, notice.failure.arrival);
  if (const auto found = calls_.find(notice.key); found != calls_.end()) {
    if (notice.failure.turn > found->second.turn) {
      if (!found->second.coming_failure.has_value()) {
        found->second.coming_failure = std::move(notice.failure);
      }
      found->second.told_by.insert(peer);
      return;
    }
    fail(notice.key, notice.failure, true);  // passed on, so that nobody hears this rank's goodbye before the reason
    return;
  }
  if (notice.failure.kind == FailureKind::kMistake && !notice.participants.empty()) {
    nameRefusals(notice.key, notice.participants);  // both may have refused the same call
  }
  if (!isPast(notice.key) && early_.size() < kMaxEarlyCalls) {
    EarlyNews& early = early_[notice.key];
    early.failure = std::move(notice.failure);
    early.participants = std::move(notice.participants);
  }
}

void ReshardService::onPeerLost(int32_t peer, const std::string& reason, bool is_goodbye) {
  LostPeer lost{is_goodbye ? "it has left the group" : reason, {globalRank(peer)}};
  if (const auto told = peer_failures_.find(peer); is_goodbye && told != peer_failures_.end()) {
    lost.reason += " after this: " + told->second.text;
    lost.blamed_ranks = told->second.blamed_ranks;
  }
  lost_.emplace(peer, lost);
  releaseWaiter();
  std::vector<CallKey> hit;
  for (const auto& [key, call] : calls_) {
    if (needs(call, peer, is_goodbye)) {
      hit.push_back(key);
    }
  }
  // Watches last: what fails first names the tensor.
  std::stable_partition(hit.begin(), hit.end(), [this](const CallKey& key) { return !calls_.at(key).request.is_watch; });
  for (const CallKey& key : hit) {
    const auto found = calls_.find(key);
    if (found == calls_.end()) {
      continue;
    }
    const ActiveCall& call = found->second;
    if (call.told_by.contains(peer)) {
      fail(key, Failure(*call.coming_failure), true);
      continue;
    }
    fail(key,
         {FailureKind::kPeer,
          callText(key, call) + ": rank " + std::to_string(globalRank(peer)) + " is lost (" + lost.reason + "); " + progressOf(call),
          lost.blamed_ranks},
         true);
  }
}

std::string ReshardService::progressOf(const ActiveCall& call) {
  if (call.executor != nullptr) {
    return describeProgress(call.executor->progress());
  }
  return call.request.is_watch && call.request.describe ? call.request.describe() : "has just started";
}

bool ReshardService::needs(const ActiveCall& call, int32_t peer, bool is_goodbye) const {
  const std::vector<int32_t>& peers = call.request.prepared->participant_peers;
  if (std::find(peers.begin(), peers.end(), peer) == peers.end()) {
    return false;
  }
  if (call.request.is_watch) {
    // A rank that has done its part may leave.
    return !is_goodbye || (call.request.arrival > 0 && !hasArrived(peer, call.request.prepared->participants, call.request.arrival));
  }
  for (int round = call.rounds_done; round < call.num_rounds; ++round) {
    if (call.request.prepared->participantAt(-(int64_t{1} << round)) == peer && !call.hellos.contains(static_cast<uint8_t>(round))) {
      return true;
    }
  }
  if (call.executor == nullptr) {
    return false;
  }
  const std::vector<int64_t> waiting = waitingFor(call.executor->progress());
  return std::find(waiting.begin(), waiting.end(), globalRank(peer)) != waiting.end();
}

void ReshardService::askAround(const CallKey& key) {
  const auto found = calls_.find(key);
  if (found == calls_.end()) {
    return;
  }
  ActiveCall& call = found->second;
  if (call.is_asking) {
    return;
  }
  call.is_asking = true;
  for (const int32_t peer : call.request.prepared->participant_peers) {
    if (peer != options_.group_rank) {
      network_->sendControl(peer, encode(Question{key, call.request.prepared->participants}));
    }
  }
  call.timer = network_->startTimer(kAnswerTime, [this, key] { concludeTimeout(key); });
}

Answer ReshardService::answerTo(const Question& question) const {
  const auto found = calls_.find(question.key);
  if (found != calls_.end()) {
    return {question.key, true, (found->second.request.is_watch ? "" : "is in this call: ") + progressOf(found->second)};
  }
  const std::string last = last_call_.empty() ? "has called no reshard yet" : "last called " + last_call_;
  return isPast(question.key) ? Answer{question.key, true, "has ended this call; " + last}
                              : Answer{question.key, false, "has not made this call; it " + last};
}

void ReshardService::takeQuestion(int32_t peer, const Question& question) {
  nameRefusals(question.key, question.participants);
  if (question.key.lane == 0) {
    asked_[peer] = question.key;
    releaseWaiter();
  }
  const auto failed = failed_.find(question.key);
  network_->sendControl(
      peer, failed != failed_.end() ? encode(FailNotice{question.key, failed->second, question.participants}) : encode(answerTo(question)));
}

void ReshardService::takeAnswer(int32_t peer, Answer answer) {
  const CallKey key = answer.key;
  const auto found = calls_.find(key);
  if (found == calls_.end() || !found->second.is_asking) {
    return;
  }
  ActiveCall& call = found->second;
  call.answers[peer] = std::move(answer);
  if (call.answers.size() + 1 == call.request.prepared->participant_peers.size()) {
    network_->cancelTimer(call.timer);
    concludeTimeout(key);
  }
}

void ReshardService::concludeTimeout(const CallKey& key) {
  const auto found = calls_.find(key);
  if (found == calls_.end()) {
    return;
  }
  const ActiveCall& call = found->second;
  std::vector<int64_t> silent;
  std::vector<int64_t> absent;
  std::string lines;
  for (const int32_t peer : call.request.prepared->participant_peers) {
    if (peer == options_.group_rank) {
      continue;
    }
    const auto answer = call.answers.find(peer);
    const bool is_silent = answer == call.answers.end();
    if (is_silent) {
      silent.push_back(globalRank(peer));
    } else if (!answer->second.has_called) {
      absent.push_back(globalRank(peer));
    }
    lines +=
        "\n  rank " + std::to_string(globalRank(peer)) + (is_silent ? " does not answer (stopped, hung or cut off)" : " " + answer->second.state);
  }
  const std::vector<int64_t>& blamed = silent.empty() ? absent : silent;
  std::string head = callText(key, call) + (call.request.is_watch ? " does not get on: a wait took longer than " : " did not end within ") +
                     std::to_string(call.request.timeout.count()) + " ms";
  if (!blamed.empty()) {
    head += silent.empty() ? ": not called by rank " : ": no answer from rank ";
    head += rankList(blamed);
  }
  fail(key, {FailureKind::kPeer, head + "; here: " + progressOf(call) + "; the others:" + lines, blamed}, true);
}

void ReshardService::remember(const CallKey& key, const Failure& failure) {
  if (!failed_.emplace(key, failure).second) {
    return;
  }
  failed_order_.push_back(key);
  if (failed_order_.size() > kMaxFailed) {
    failed_.erase(failed_order_.front());
    failed_order_.pop_front();
  }
}

std::string ReshardService::callText(const CallKey& key, const ActiveCall& call) const {
  const PreparedPlan& prepared = *call.request.prepared;
  if (call.request.key.has_value()) {
    return "on rank " + std::to_string(globalRank(options_.group_rank)) + ", " +
           (call.request.describe && !call.request.is_watch ? call.request.describe() : prepared.summary);
  }
  return "on rank " + std::to_string(globalRank(options_.group_rank)) + ", " +
         (key.lane == 0 ? "reshard call " + std::to_string(key.count) : "backward of a reshard") + " of ranks " + rankList(prepared.participants) +
         " (" + prepared.summary + ")";
}
}  // namespace xmesh::runtime
