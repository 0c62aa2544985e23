#include "runtime/calls/calls.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace xmesh::runtime {
namespace {

constexpr std::chrono::milliseconds kAnswerTime{2000};
constexpr std::chrono::milliseconds kHeldTime{5};  ///< that a call may keep agreed ones back before the others are asked

bool isCompared(CallKind kind) { return kind == CallKind::kReshard || kind == CallKind::kMeeting; }

/// The peers without whom a call cannot start. Of a transfer, those that this rank has no messages with may have done their part and left.
const std::vector<int32_t>& neededToStart(const Call& call) {
  return call.kind == CallKind::kTransfer ? call.movement->prepared->program_peers : call.terms->participants.peers;
}

}  // namespace

void Calls::start(Call call) {
  const CallKey key = call.key;
  const auto started = calls_.emplace(key, std::move(call)).first;
  try {
    begin(started->second);
  } catch (const std::exception& error) {
    fail(key, {FailureKind::kGroup, std::string("a reshard could not start: ") + error.what(), {}});
  }
}

void Calls::begin(Call& call) {
  const CallKey key = call.key;
  const Participants& participants = call.terms->participants;
  history_.start(key);
  if (call.kind == CallKind::kReshard) {
    history_.setLastCall("reshard call " + std::to_string(key.count) + " of ranks " + rankList(participants.ranks) + ": " + call.terms->summary);
  }
  call.rounds = AgreementRounds(isCompared(call.kind) ? participants.size() : 1);
  EarlyNews early = history_.takeNews(key);
  if (early.failure.has_value()) {
    arrivals_.settle(key, *early.failure);
    fail(key, *early.failure);
    return;
  }
  if (!joinWatch(call)) {
    return;
  }
  for (const int32_t peer : neededToStart(call)) {
    if (const auto lost = peers_.lost().find(peer); lost != peers_.lost().end()) {
      const std::string text =
          textOf(call) + " cannot start: rank " + std::to_string(peers_.globalRank(peer)) + " is lost (" + lost->second.reason + ")";
      fail(key, {FailureKind::kPeer, text, lost->second.blamed_ranks});
      return;
    }
  }
  if (call.timeout.count() > 0 && call.kind != CallKind::kWatch) {
    call.timer = network_->startTimer(call.timeout, [this, key] { askAround(key); });
  }
  if (call.pipeline > 0) {
    if (const std::optional<Failure> conflict = arrivals_.begin(key, participants.ranks, participants.peers, call.pipeline)) {
      fail(key, *conflict);
      return;
    }
  }
  if (call.kind == CallKind::kReshard) {
    for (const int32_t peer : participants.peers) {
      refusals_.ask(key, participants, peer);
    }
  }
  call.is_moved = call.kind == CallKind::kMeeting;
  if (call.movement.has_value()) {
    makeExecutor(call);
  }
  if (!call.rounds.isDone()) {
    sendNotice(call);
  }
  if (call.executor != nullptr && (call.rounds.isDone() || !call.waits_for_agreement)) {
    call.executor->start(call.start_terms);
  }
  if (call.executor != nullptr && call.rounds.isDone()) {
    call.executor->hasAgreed();
  }
  for (auto& [peer, notice] : early.notices) {
    hear(peer, std::move(notice));
  }
  finishIfDone(key);
}

void Calls::makeExecutor(Call& call) {
  Execution execution;
  execution.call = operationOf(call.key, call.terms->fingerprint);
  execution.movement = *std::exchange(call.movement, std::nullopt);
  execution.on_done = [this, key = call.key] {
    // Later, not now: the executor must not be destroyed inside its own callback.
    network_->post([this, key] {
      if (const auto found = calls_.find(key); found != calls_.end()) {
        found->second.is_moved = true;
        if (found->second.handle->isDetached()) {
          found->second.handle->markMoved();
        }
        finishIfDone(key);
      }
    });
  };
  execution.on_enqueued = [handle = call.handle] { handle->markEnqueued(); };
  execution.on_failed = [this, key = call.key](const std::string& reason, int32_t peer) {
    network_->post([this, key, reason, peer] { breakOff(key, reason, peer); });
  };
  execution.on_held = [this, key = call.key](uint64_t turn) {
    // Most are agreed a moment later.
    network_->startTimer(kHeldTime, [this, key, turn] {
      if (const auto found = calls_.find(key); found != calls_.end() && !found->second.rounds.isDone()) {
        peers_.tell(found->second.terms->participants.peers, encode(TurnRequest{key, turn, false}));
      }
    });
  };
  Executors& executors = executors_->at(execution.movement.route);
  const StartsWhen when = executors.startsWhen();
  call.waits_for_agreement = when != StartsWhen::kAtOnce && isCompared(call.kind);
  core::require(when != StartsWhen::kInTurn || isCompared(call.kind),
                "calls on a device start in an order that their ranks agree on: a transfer cannot");
  call.knows_progress = executors.knowsProgress();
  call.executor = executors.make(std::move(execution));
  call.start_terms = call.executor->proposal();
}

void Calls::breakOff(const CallKey& key, const std::string& reason, int32_t peer) {
  const auto found = calls_.find(key);
  if (found == calls_.end()) {
    return;
  }
  const std::string text = textOf(found->second) + ": " + reason;
  fail(key, {FailureKind::kPeer, text, peer < 0 ? std::vector<int64_t>{} : std::vector<int64_t>{peers_.globalRank(peer)}});
}

void Calls::sendNotice(const Call& call) {
  const CallTerms& terms = *call.terms;
  peers_.tell(terms.participants.peerAt(call.rounds.distance()),
              encode(CallNotice{call.key, call.rounds.round(), call.start_terms, terms.fingerprint, terms.fields}));
}

void Calls::advanceAgreement(const CallKey& key) {
  Call& call = calls_.at(key);
  while (call.rounds.advance()) {
    if (!call.rounds.isDone()) {
      sendNotice(call);
    } else if (call.executor != nullptr) {
      if (call.waits_for_agreement) {
        call.executor->start(call.start_terms);
      }
      call.executor->hasAgreed();
    }
  }
  finishIfDone(key);
}

void Calls::finishIfDone(const CallKey& key) {
  const auto found = calls_.find(key);
  if (found == calls_.end() || !found->second.is_moved || !found->second.rounds.isDone()) {
    return;
  }
  Call call = std::move(found->second);
  calls_.erase(found);
  history_.end(key);
  if (call.watch.has_value()) {
    if (const auto watch = calls_.find(*call.watch); watch != calls_.end()) {
      watch->second.watched.leave(call.key);
    }
  }
  end(call, std::nullopt);
}

void Calls::end(Call& call, const std::optional<Failure>& failure) {
  network_->cancelTimer(call.timer);
  arrivals_.end(call.key);
  call.executor.reset();  // the tensors are free before anybody is told
  call.movement.reset();
  call.handle->complete(failure);
}

void Calls::fail(const CallKey& key, const Failure& failure, bool tell) {
  const auto found = calls_.find(key);
  if (found == calls_.end()) {
    return;
  }
  Call call = std::move(found->second);
  calls_.erase(found);
  history_.fail(call.key, failure);
  if (failure.kind == FailureKind::kPeer) {
    last_peer_failure_ = failure;
  }
  if (tell) {  // first: to cancel may take long where a device is aborted
    peers_.tell(call.terms->participants.peers, encode(FailNotice{call.key, failure, call.terms->participants.ranks}));
  }
  if (call.executor != nullptr) {
    call.executor->cancel(failure);
  }
  failWithWatch(call, failure);
  end(call, failure);
}

bool Calls::joinWatch(const Call& call) {
  if (!call.watch.has_value()) {
    return true;
  }
  const CallKey watch = *call.watch;
  if (const auto found = calls_.find(watch); found != calls_.end()) {
    const std::optional<Failure> failure = found->second.watched.join(call.key, call.phase);
    if (failure.has_value()) {
      fail(watch, *failure);
    }
    return !failure.has_value();
  }
  const Failure* failure = history_.failureOf(watch);
  fail(call.key, failure != nullptr ? Failure(*failure) : Failure{FailureKind::kGroup, textOf(call) + ": what it belongs to is closed", {}}, false);
  return false;
}

void Calls::failWithWatch(const Call& call, const Failure& failure) {
  if (call.watch.has_value()) {
    if (const auto watch = calls_.find(*call.watch); watch != calls_.end()) {
      watch->second.watched.leave(call.key);
      fail(*call.watch, failure);
    }
  }
  for (const CallKey& watched : call.watched.calls()) {
    fail(watched, failure, false);
  }
}

void Calls::release(const CallKey& watch, const std::optional<Failure>& farewell) {
  const auto found = calls_.find(watch);
  if (found == calls_.end()) {
    return;
  }
  Call call = std::move(found->second);
  calls_.erase(found);
  if (farewell.has_value()) {
    peers_.tell(call.terms->participants.peers, encode(FailNotice{call.key, *farewell, {}}));
  }
  end(call, std::nullopt);
}

void Calls::lose(int32_t peer, const LostPeer& lost, bool is_goodbye) {
  std::vector<CallKey> hit;
  for (const auto& [key, call] : calls_) {
    if (needs(call, peer, is_goodbye)) {
      hit.push_back(key);
    }
  }
  // Watches last: what fails first names the tensor.
  std::stable_partition(hit.begin(), hit.end(), [this](const CallKey& key) { return calls_.at(key).kind != CallKind::kWatch; });
  for (const CallKey& key : hit) {
    const auto found = calls_.find(key);
    if (found == calls_.end()) {
      continue;
    }
    const Call& call = found->second;
    if (const std::optional<Failure> told = call.watched.toldBy(peer)) {
      fail(key, *told);
      continue;
    }
    const std::string text =
        textOf(call) + ": rank " + std::to_string(peers_.globalRank(peer)) + " is lost (" + lost.reason + "); " + progressOf(call);
    fail(key, {FailureKind::kPeer, text, lost.blamed_ranks});
  }
}

bool Calls::needs(const Call& call, int32_t peer, bool is_goodbye) const {
  const Participants& participants = call.terms->participants;
  if (std::find(participants.peers.begin(), participants.peers.end(), peer) == participants.peers.end()) {
    return false;
  }
  if (call.kind == CallKind::kWatch) {
    // A rank that has done its part may leave.
    return !is_goodbye || (call.pipeline > 0 && !arrivals_.hasArrived(peer, call.key));
  }
  bool is_missed = false;
  call.rounds.forEachMissing([&](int64_t distance) { is_missed = is_missed || participants.peerAt(-distance) == peer; });
  if (is_missed || call.executor == nullptr) {
    return is_missed;
  }
  if (is_goodbye && !call.knows_progress) {
    return false;  // it leaves when its own part has passed its stream, of which this rank's may not have told yet
  }
  const std::vector<int64_t> waiting = waitingFor(call.executor->progress());
  return std::find(waiting.begin(), waiting.end(), peers_.globalRank(peer)) != waiting.end();
}

void Calls::askAround(const CallKey& key) {
  const auto found = calls_.find(key);
  if (found != calls_.end() && found->second.inquiry.begin(key, found->second.terms->participants, peers_)) {
    found->second.timer = network_->startTimer(kAnswerTime, [this, key] { concludeInquiry(key); });
  }
}

void Calls::concludeInquiry(const CallKey& key) {
  const auto found = calls_.find(key);
  if (found == calls_.end()) {
    return;
  }
  const Call& call = found->second;
  const std::string head = textOf(call) + (call.kind == CallKind::kWatch ? " does not get on: a wait took longer than " : " did not end within ") +
                           std::to_string(call.timeout.count()) + " ms";
  fail(key, call.inquiry.conclude(head, progressOf(call), call.terms->participants, peers_));
}

std::string Calls::progressOf(const Call& call) {
  if (call.executor != nullptr) {
    return describeProgress(call.executor->progress());
  }
  return call.kind == CallKind::kWatch && call.describe ? call.describe() : "has just started";
}

std::string Calls::textOf(const Call& call) const {
  std::string here = "on rank " + std::to_string(peers_.myGlobalRank()) + ", ";
  switch (call.kind) {
    case CallKind::kReshard:
      return here + (call.key.lane == 0 ? "reshard call " + std::to_string(call.key.count) : "backward of a reshard") + " of ranks " +
             rankList(call.terms->participants.ranks) + " (" + call.terms->summary + ")";
    case CallKind::kTransfer:
      return here + (call.describe ? call.describe() : call.terms->summary);
    case CallKind::kMeeting:
    case CallKind::kWatch:
      return here + call.terms->summary;
  }
  return here;
}

/// Elsewhere they see which messages have not come; see needs(). Who leaves after a PeerError leaves for that.
void Calls::tellUndone() {
  const int64_t me = peers_.myGlobalRank();
  const std::string after = last_peer_failure_.has_value() ? ", after this: " + last_peer_failure_->text : "";
  const std::vector<int64_t> blamed = last_peer_failure_.has_value() ? last_peer_failure_->blamed_ranks : std::vector<int64_t>{me};
  for (const auto& [key, call] : calls_) {
    if (call.executor != nullptr && !call.knows_progress && !call.is_moved) {
      const Failure failure{FailureKind::kPeer,
                            textOf(call) + ": rank " + std::to_string(me) + " has left the group before it had ended there" + after, blamed};
      peers_.tell(call.terms->participants.peers, encode(FailNotice{key, failure, call.terms->participants.ranks}));
    }
  }
}

void Calls::abandon() {
  for (auto& [key, call] : calls_) {
    if (call.executor != nullptr) {
      call.executor->abandon();
    }
  }
  executors_->abandon();
  for (auto& [key, call] : calls_) {
    call.handle->complete(Failure{FailureKind::kGroup, textOf(call) + ": the process group was closed while it was in flight", {}});
  }
  calls_.clear();
}

}  // namespace xmesh::runtime
