// What a rank does about what others say.
#include <algorithm>
#include <utility>

#include "runtime/calls/calls.h"

namespace xmesh::runtime {

void Calls::hear(int32_t peer, CallNotice notice) {
  const CallKey key = notice.key;
  const auto found = calls_.find(key);
  if (found == calls_.end()) {
    if (const Failure* failure = history_.failureOf(key)) {
      peers_.tell(peer, encode(FailNotice{key, *failure, {}}));
    } else if (EarlyNews* news = history_.newsFor(key)) {
      news->notices.emplace_back(peer, std::move(notice));
      refusals_.tellOnce(peer);
    }
    return;
  }
  Call& call = found->second;
  if (notice.fingerprint != call.terms->fingerprint) {
    const std::string what = firstDifference(call.terms->fields, peers_.myGlobalRank(), notice.fields, peers_.globalRank(peer));
    fail(key, {FailureKind::kMistake, textOf(call) + ": ranks disagree on " + what, {}});
    return;
  }
  call.start_terms.raiseTo(notice.start_terms);
  call.rounds.hear(notice.round);
  advanceAgreement(key);
}

void Calls::hear(int32_t peer, FailNotice notice) {
  if (notice.failure.kind == FailureKind::kPeer) {
    peers_.heardFailure(peer, notice.failure);
  }
  const auto found = calls_.find(notice.key);
  if (notice.failure.arrived_peer == peers_.groupRank() && found == calls_.end()) {
    if (const auto failed = arrivals_.takeBlame(notice)) {
      fail(failed->first, failed->second);
    }
    return;
  }
  if (found != calls_.end()) {
    arrivals_.settle(notice.key, notice.failure);
    if (found->second.kind != CallKind::kWatch || found->second.watched.isDue(peer, notice.failure)) {
      fail(notice.key, notice.failure);  // passed on, so that nobody hears this rank's goodbye before the reason
    }
    return;
  }
  if (history_.isPast(notice.key)) {
    arrivals_.settle(notice.key, notice.failure);
  } else if (arrivals_.hasFailedBy(notice.failure)) {
    arrivals_.passOver(notice.key);  // this rank was elsewhere, and will not come
    return;
  }
  if (notice.failure.kind == FailureKind::kMistake && !notice.participants.empty()) {
    refusals_.name(notice.key, notice.participants);  // both may have refused the same call
  }
  if (EarlyNews* news = history_.newsFor(notice.key)) {
    news->failure = std::move(notice.failure);
    news->participants = std::move(notice.participants);
  }
}

void Calls::hear(int32_t peer, Arrival arrival) {
  for (const auto& [watch, failure] : arrivals_.hear(peer, std::move(arrival))) {
    fail(watch, failure);
  }
}

void Calls::hear(int32_t peer, const UnnamedRefusals& unnamed) {
  refusals_.hear(peer, unnamed);
  for (const auto& [key, call] : calls_) {
    if (call.kind == CallKind::kReshard) {
      refusals_.ask(key, call.terms->participants, peer);
    }
  }
}

Answer Calls::answerTo(const Question& question) const {
  const auto found = calls_.find(question.key);
  if (found != calls_.end()) {
    return {question.key, true, (found->second.kind == CallKind::kWatch ? "" : "is in this call: ") + progressOf(found->second)};
  }
  const std::string last = history_.lastCall().empty() ? "has called no reshard yet" : "last called " + history_.lastCall();
  return history_.isPast(question.key) ? Answer{question.key, true, "has ended this call; " + last}
                                       : Answer{question.key, false, "has not made this call; it " + last};
}

void Calls::hear(int32_t peer, const Question& question) {
  refusals_.heardQuestion(peer, question);
  const Failure* failure = history_.failureOf(question.key);
  peers_.tell(peer, failure != nullptr ? encode(FailNotice{question.key, *failure, question.participants}) : encode(answerTo(question)));
}

void Calls::hear(int32_t peer, Answer answer) {
  const CallKey key = answer.key;
  const auto found = calls_.find(key);
  if (found != calls_.end() && found->second.inquiry.hear(peer, std::move(answer), found->second.terms->participants)) {
    concludeInquiry(key);
  }
}

void Calls::hear(int32_t peer, const TurnRequest& request) {
  const auto found = calls_.find(request.key);
  if (request.is_promise) {
    if (found != calls_.end() && found->second.executor != nullptr) {
      found->second.executor->comesAfter(request.turn);
    }
  } else if (found == calls_.end() && !history_.isPast(request.key)) {
    executors_->promise(request.turn);
    peers_.tell(peer, encode(TurnRequest{request.key, request.turn, true}));
  }
}

}  // namespace xmesh::runtime
