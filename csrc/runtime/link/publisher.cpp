#include "runtime/link/publisher.h"

#include <algorithm>
#include <utility>

namespace xmesh::runtime::link {
namespace {

constexpr std::chrono::milliseconds kGrace{5'000};  ///< in which those who wait find out whom they wait for

Message aboutParty(Kind kind, const Party& party) {
  Message out;
  out.kind = kind;
  out.party = party;
  return out;
}

Message aboutAttempt(Kind kind, const Attempt& attempt) {
  Message out;
  out.kind = kind;
  out.attempt = attempt;
  return out;
}

}  // namespace

void Publisher::meet(const Party& replica, uint64_t newest) {
  newest_ = std::max(newest_, newest);
  const auto same = std::find_if(replicas_.begin(), replicas_.end(), [&](const auto& known) { return known.second.replica == replica.replica; });
  if (same != replicas_.end() && same->first == replica.number) {
    return;
  }
  if (same != replicas_.end()) {
    Message over;
    over.kind = Kind::kBroken;
    over.text = "replica '" + replica.replica + "' has been started again";
    ways_.tell(same->second, over);
    lose(same->first);
  }
  replicas_.emplace(replica.number, replica);
  ways_.tell(replica, aboutParty(Kind::kKnow, source_));
  for (const auto& [number, other] : replicas_) {
    ways_.tell(replica, aboutParty(Kind::kKnow, other));
    if (number != replica.number) {
      ways_.tell(other, aboutParty(Kind::kKnow, replica));
    }
  }
  ways_.tell(source_, aboutParty(Kind::kKnow, replica));
}

void Publisher::lose(uint64_t party) {
  const auto found = replicas_.find(party);
  if (found == replicas_.end()) {
    return;
  }
  const std::string who = found->second.str();
  replicas_.erase(found);
  tellGone(party);
  if (run_ == nullptr) {
    return;
  }
  run_->left_out.push_back(who + ": it is gone");
  run_->candidates.erase(party);
  run_->holders.erase(party);
  if (run_->said.erase(party) > 0) {
    run_->has_lost = true;
    if (run_->is_moving) {
      checkDone();
    } else {
      startAttempt();
    }
  }
}

void Publisher::tellGone(uint64_t party) {
  Message forget;
  forget.kind = Kind::kForget;
  forget.numbers = {party};
  ways_.tell(source_, forget);
  for (const auto& [number, other] : replicas_) {
    ways_.tell(other, forget);
  }
}

void Publisher::publish(uint64_t version) {
  if (version <= newest_) {
    ways_.settle({version, "versions ascend: version " + std::to_string(version) + " is not above version " + std::to_string(newest_), {}, {}});
    return;
  }
  newest_ = version;
  run_ = std::make_unique<Run>();
  run_->attempt.source = source_.number;
  run_->attempt.version = version;
  for (const auto& [number, replica] : replicas_) {
    run_->candidates.insert(number);
  }
  startAttempt();
}

void Publisher::tellAll(const Message& message) {
  std::vector<const Party*> parties;  // telling may lose one
  for (const auto& [number, said] : run_->said) {
    parties.push_back(number == source_.number ? &source_ : &replicas_.at(number));
  }
  for (const Party* party : parties) {
    ways_.tell(*party, message);
  }
}

void Publisher::startAttempt() {
  endTimer();
  if (run_->candidates.empty()) {
    settle("");
    return;
  }
  ++run_->attempt.number;
  run_->is_moving = false;
  run_->is_aborted = false;
  run_->has_lost = false;
  run_->said.clear();
  run_->said[source_.number];
  Message offer = aboutAttempt(Kind::kOffer, run_->attempt);
  offer.numbers.push_back(source_.number);
  for (const uint64_t party : run_->candidates) {
    run_->said[party];
    offer.numbers.push_back(party);
  }
  run_->timer = ways_.start_timer(deadline_, [this] { onDeadline(); });
  tellAll(offer);
}

void Publisher::endTimer() {
  if (const uint64_t timer = std::exchange(run_->timer, 0); timer != 0) {
    ways_.cancel_timer(timer);
  }
}

void Publisher::hear(uint64_t party, const Message& message) {
  if (run_ == nullptr || message.attempt != run_->attempt || !run_->said.contains(party)) {
    return;  // of an attempt that is over
  }
  Said& said = run_->said.at(party);
  if (message.kind == Kind::kAccept) {
    said.fingerprint = message.text;
    checkAccepted();
  } else {
    said.done = message;
    if (message.has_all && party != source_.number) {
      run_->holders.insert(party);
      run_->candidates.erase(party);
    }
    checkDone();
  }
}

void Publisher::checkAccepted() {
  const auto has_spoken = [](const auto& entry) { return entry.second.fingerprint.has_value() || entry.second.done.has_value(); };
  if (run_->is_moving || !std::all_of(run_->said.begin(), run_->said.end(), has_spoken)) {
    return;
  }
  const std::optional<std::string> expected = run_->said.at(source_.number).fingerprint;
  if (!expected.has_value()) {
    checkDone();
    return;
  }
  std::vector<std::pair<uint64_t, std::string>> strangers;
  for (const auto& [party, said] : run_->said) {
    if (said.done.has_value()) {
      strangers.emplace_back(party, said.done->text);
    } else if (said.fingerprint != expected) {
      strangers.emplace_back(party, "it makes another plan than the source of what is to move (do they run the same version?)");
    }
  }
  if (!strangers.empty()) {
    for (const auto& [party, why] : strangers) {
      leaveOut(party, why);
    }
    startAttempt();
    return;
  }
  run_->is_moving = true;
  endTimer();
  run_->timer = ways_.start_timer(deadline_ + kGrace, [this] { onDeadline(); });
  tellAll(aboutAttempt(Kind::kGo, run_->attempt));
}

void Publisher::checkDone() {
  if (!run_->is_moving) {
    const auto source = run_->said.find(source_.number);
    if (source->second.done.has_value()) {
      leaveOutMisfits(*source->second.done);
    } else {
      checkAccepted();
    }
    return;
  }
  if (!std::all_of(run_->said.begin(), run_->said.end(), [](const auto& entry) { return entry.second.done.has_value(); })) {
    return;
  }
  std::map<uint64_t, std::string> blamed;
  std::string own_failure;
  for (const auto& [party, said] : run_->said) {
    if (said.done->has_all) {
      continue;
    }
    for (const uint64_t member : said.done->numbers) {
      for (const uint64_t candidate : run_->candidates) {
        if (replicas_.at(candidate).has(static_cast<int32_t>(member))) {
          blamed.try_emplace(candidate, said.done->text);
        }
      }
      if (source_.has(static_cast<int32_t>(member))) {
        own_failure = said.done->text;
      }
    }
  }
  if (blamed.empty() && !run_->has_lost) {  // nobody knows whose fault it is
    const Said& source = run_->said.at(source_.number);
    own_failure = own_failure.empty() && !source.done->has_all ? source.done->text : own_failure;
    for (const uint64_t candidate : run_->candidates) {
      blamed.try_emplace(candidate, run_->said.at(candidate).done->text);
    }
  }
  for (const auto& [party, why] : blamed) {
    leaveOut(party, why);
  }
  if (own_failure.empty()) {
    startAttempt();
  } else {
    settle(own_failure);
  }
}

/// The source could not even begin: because of replicas that it names, or of itself.
void Publisher::leaveOutMisfits(const Message& done) {
  std::vector<uint64_t> misfits;
  for (const uint64_t candidate : run_->candidates) {
    const Party& party = replicas_.at(candidate);
    if (std::any_of(done.numbers.begin(), done.numbers.end(), [&](uint64_t member) { return party.has(static_cast<int32_t>(member)); })) {
      misfits.push_back(candidate);
    }
  }
  if (misfits.empty()) {
    settle(done.text);
    return;
  }
  for (const uint64_t misfit : misfits) {
    leaveOut(misfit, done.text);
  }
  startAttempt();
}

void Publisher::onDeadline() {
  run_->timer = 0;
  std::vector<uint64_t> late;
  for (const auto& [party, said] : run_->said) {
    if (!said.done.has_value() && (run_->is_moving || !said.fingerprint.has_value())) {
      late.push_back(party);
    }
  }
  if (run_->is_moving && !run_->is_aborted) {
    run_->is_aborted = true;
    run_->timer = ways_.start_timer(kGrace, [this] { onDeadline(); });
    tellAll(aboutAttempt(Kind::kAbort, run_->attempt));
    return;
  }
  const std::string within = " within " + std::to_string(deadline_.count()) + " ms";
  if (std::find(late.begin(), late.end(), source_.number) != late.end()) {
    settle("the source itself " + std::string(run_->is_moving ? "did not send version " : "was not ready for version ") +
           std::to_string(run_->attempt.version) + within);
    return;
  }
  for (const uint64_t party : late) {
    leaveOut(party, std::string(run_->is_moving ? "it has not got version " : "it was not ready for version ") +
                        std::to_string(run_->attempt.version) + within);
    run_->said.erase(party);
    run_->has_lost = true;
  }
  if (run_->is_moving) {
    checkDone();
  } else {
    startAttempt();
  }
}

void Publisher::leaveOut(uint64_t party, const std::string& why) {
  const auto found = replicas_.find(party);
  if (found == replicas_.end()) {
    return;
  }
  run_->candidates.erase(party);
  run_->left_out.push_back(found->second.str() + ": " + why);
  Message left_out;
  left_out.kind = Kind::kLeftOut;
  left_out.attempt = run_->attempt;
  left_out.text = why;
  const Party gone = found->second;
  replicas_.erase(found);
  ways_.tell(gone, left_out);
  tellGone(party);
}

void Publisher::settle(const std::string& error) {
  endTimer();
  const Run run = std::move(*run_);
  run_.reset();
  ways_.settle({run.attempt.version, error, {run.holders.begin(), run.holders.end()}, run.left_out});
}

}  // namespace xmesh::runtime::link
