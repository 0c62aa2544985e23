#include "runtime/link/node.h"

#include <algorithm>

#include "core/error.h"

namespace xmesh::runtime::link {

Node::Node(Options options, transport::ControlNetwork& network, NodeEvents& events)
    : options_(std::move(options)), network_(network), events_(events) {}

Node::~Node() { *is_alive_ = false; }

void Node::tell(int32_t member, const Message& message) {
  if (member != options_.self.number) {
    network_.sendControl(member, encode(message));
    return;
  }
  network_.post([this, alive = is_alive_, message] {
    if (*alive) {
      handle(options_.self.number, message);
    }
  });
}

void Node::tellRanks(const Message& message) {
  for (const Member& member : own_->members) {
    tell(member.number, message);
  }
}

void Node::tellSource(Message message) {
  if (source_leader_ >= 0) {
    message.count = own_->number;
    tell(source_leader_, message);
  }
}

void Node::enter(int32_t leader) {
  leader_ = leader;
  Message message;
  message.kind = Kind::kEnter;
  message.rank = options_.rank;
  message.size = options_.size;
  message.party.is_source = options_.is_source;
  message.party.replica = options_.replica;
  message.party.members = {options_.self};
  tell(leader, message);
}

void Node::meet(int32_t source_leader) {
  core::require(leads() && own_.has_value() && !options_.is_source, "only the leader of a replica that is formed meets a source");
  source_leader_ = source_leader;
  Message message;
  message.kind = Kind::kMeet;
  message.attempt.version = newest_;
  message.party = *own_;
  tell(source_leader, message);
}

void Node::publish(uint64_t version) {
  Message message;
  message.kind = Kind::kReady;
  message.attempt.version = version;
  tell(leader_, message);
}

void Node::accept(const Attempt& attempt, const std::string& fingerprint) {
  Message message;
  message.kind = Kind::kAccept;
  message.attempt = attempt;
  message.text = fingerprint;
  tell(leader_, message);
}

void Node::done(const Attempt& attempt, bool has_all, const std::string& why, const std::vector<int32_t>& blamed) {
  Message message;
  message.kind = Kind::kDone;
  message.attempt = attempt;
  message.has_all = has_all;
  message.text = why;
  message.numbers.assign(blamed.begin(), blamed.end());
  tell(leader_, message);
}

uint64_t Node::swap() {
  Message message;
  message.kind = Kind::kSwap;
  message.count = ++num_swaps_;
  tell(leader_, message);
  return num_swaps_;
}

void Node::hear(int32_t peer, std::string_view bytes) { handle(peer, decode(bytes)); }

void Node::handle(int32_t from, const Message& message) {
  if (is_broken_) {
    return;
  }
  switch (message.kind) {
    case Kind::kEnter:
      onEnter(from, message);
      return;
    case Kind::kMeet:
      meetNow(from, message);
      return;
    case Kind::kAccept:
    case Kind::kDone:
      if (own_.has_value() && leads() && own_->has(from)) {
        onOwnReport(from, message);
      } else if (publisher_ != nullptr && party_of_leader_.contains(from)) {
        publisher_->hear(message.count, message);
      }
      return;
    case Kind::kReady:
      onReady(from, message.attempt.version);
      return;
    case Kind::kSwap:
      onSwap(from, message.count);
      return;
    default:
      break;
  }
  if (message.kind == Kind::kBroken && publisher_ != nullptr) {
    if (const auto found = party_of_leader_.find(from); found != party_of_leader_.end()) {
      publisher_->lose(found->second);
    }
  } else if (leads() && !options_.is_source && from == source_leader_) {
    pass(message);
  } else if (from == leader_) {
    hearLeader(message);
  }
}

void Node::meetNow(int32_t from, const Message& message) {
  if (publisher_ == nullptr) {
    early_[from] = message;
    return;
  }
  network_.setAddress(from, message.party.members.at(0).address);
  party_of_leader_[from] = message.party.number;
  publisher_->meet(message.party, message.attempt.version);
}

/// A replica's leader passes on what the source's tells it.
void Node::pass(const Message& message) {
  switch (message.kind) {
    case Kind::kOffer:
      reports_ = {message.attempt, {}, {}, false, false};
      if (message.attempt.version <= newest_) {
        Message refused;
        refused.kind = Kind::kDone;
        refused.attempt = message.attempt;
        refused.text = "it has had version " + std::to_string(newest_);
        tellSource(refused);
        return;
      }
      break;
    case Kind::kGo:
      held_ = 0;
      reports_.is_moving = true;
      break;
    case Kind::kAbort:
      reports_.is_moving = false;
      break;
    case Kind::kBroken:
      breakParty(message.text);
      return;
    case Kind::kSourceLost:
      source_leader_ = -1;
      break;
    default:
      break;
  }
  tellRanks(message);
  if (message.kind == Kind::kLeftOut) {
    meet(source_leader_);
  }
}

void Node::hearLeader(const Message& message) {
  switch (message.kind) {
    case Kind::kFormed:
      own_ = message.party;
      makePublisher();
      events_.onFormed(*own_);
      break;
    case Kind::kKnow:
      known_[message.party.number] = message.party;
      for (const Member& member : message.party.members) {
        if (member.number != options_.self.number) {
          network_.setAddress(member.number, member.address);
        }
      }
      events_.onKnown(message.party);
      break;
    case Kind::kForget:
      known_.erase(message.numbers.at(0));
      events_.onForgotten(message.numbers.at(0));
      break;
    case Kind::kOffer:
      showOffer(message);
      break;
    case Kind::kGo:
      events_.onGo(message.attempt);
      break;
    case Kind::kAbort:
      events_.onAbort(message.attempt);
      break;
    case Kind::kHolds:
      events_.onHeld(message.attempt.version);
      break;
    case Kind::kSettled:
      events_.onSettled({message.attempt.version, message.text, message.numbers, message.texts});
      break;
    case Kind::kSwapped:
      events_.onSwapped(message.count, message.attempt.version, message.numbers.at(0));
      break;
    case Kind::kLeftOut:
      for (const auto& [number, party] : std::exchange(known_, {})) {
        events_.onForgotten(number);
      }
      events_.onLeftOut(message.text);
      break;
    case Kind::kSourceLost:
      events_.onSourceLost(message.text);
      break;
    case Kind::kBroken:
      breakParty(message.text);
      break;
    default:
      break;
  }
}

void Node::showOffer(const Message& offer) {
  std::vector<Party> parties;
  for (const uint64_t number : offer.numbers) {
    const auto found = number == own_->number ? known_.end() : known_.find(number);
    if (number != own_->number && found == known_.end()) {
      done(offer.attempt, false, "the offer names a party that this rank does not know");
      return;
    }
    parties.push_back(number == own_->number ? *own_ : found->second);
  }
  events_.onOffer(offer.attempt, parties);
}

void Node::onEnter(int32_t from, const Message& message) {
  if (!leads() || own_.has_value() || message.party.members.size() != 1) {
    return;
  }
  const Member& member = message.party.members.front();
  if (from != options_.self.number) {
    network_.setAddress(from, member.address);
  }
  if (message.size != options_.size || message.rank < 0 || message.rank >= options_.size || message.party.is_source != options_.is_source ||
      message.party.replica != options_.replica) {
    breakParty("rank " + std::to_string(message.rank) + " of " + std::to_string(message.size) + " wants to join a party of " +
               std::to_string(options_.size) + " ranks");
    return;
  }
  entered_[message.rank] = member;
  if (std::cmp_not_equal(entered_.size(), options_.size)) {
    return;
  }
  Message formed;
  formed.kind = Kind::kFormed;
  formed.party = {options_.party, options_.is_source, options_.replica, {}};
  for (const auto& [rank, one] : entered_) {
    formed.party.members.push_back(one);
  }
  own_ = formed.party;
  tellRanks(formed);
}

void Node::makePublisher() {
  if (!leads() || !options_.is_source) {
    return;
  }
  Publisher::Ways ways;
  ways.tell = [this](const Party& party, const Message& message) {
    if (party.number == own_->number) {
      if (message.kind == Kind::kOffer) {
        reports_ = {message.attempt, {}, {}, false, false};
      } else if (message.kind == Kind::kGo) {
        reports_.is_moving = true;
      }
      tellRanks(message);
    } else {
      tell(party.leader(), message);
    }
  };
  ways.settle = [this](const Settlement& settlement) {
    Message settled;
    settled.kind = Kind::kSettled;
    settled.attempt.version = settlement.version;
    settled.text = settlement.error;
    settled.numbers = settlement.holders;
    settled.texts = settlement.left_out;
    tellRanks(settled);
  };
  ways.start_timer = [this](std::chrono::milliseconds delay, std::function<void()> task) { return network_.startTimer(delay, std::move(task)); };
  ways.cancel_timer = [this](uint64_t timer) { network_.cancelTimer(timer); };
  publisher_ = std::make_unique<Publisher>(*own_, options_.deadline, std::move(ways));
  for (const auto& [from, message] : std::exchange(early_, {})) {
    meetNow(from, message);
  }
}

void Node::onReady(int32_t from, uint64_t version) {
  if (publisher_ == nullptr || !own_->has(from)) {
    return;
  }
  ready_[from] = version;
  if (ready_.size() < own_->members.size()) {
    return;
  }
  const auto [least, most] = std::minmax_element(ready_.begin(), ready_.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  Message refused;
  refused.kind = Kind::kSettled;
  if (least->second == most->second) {
    ready_.clear();
    publisher_->publish(version);
    return;
  }
  refused.text = "the source's ranks publish different versions: " + std::to_string(least->second) + " and " + std::to_string(most->second);
  for (const auto& [member, own_version] : std::exchange(ready_, {})) {
    refused.attempt.version = own_version;
    tell(member, refused);
  }
}

void Node::onOwnReport(int32_t from, const Message& message) {
  if (message.attempt != reports_.attempt) {
    return;
  }
  if (message.kind == Kind::kAccept) {
    reports_.accepted[from] = message.text;
  } else {
    Message& done = reports_.done[from] = message;
    if (done.has_all && !reports_.is_moving) {
      done.has_all = false;
      done.text = "its time was over";
    }
  }
  answer();
}

/// Tells the source's leader what the party says, once all of its ranks have spoken.
void Node::answer() {
  const size_t count = own_->members.size();
  Message out;
  out.attempt = reports_.attempt;
  if (reports_.done.size() == count) {
    out.kind = Kind::kDone;
    out.has_all = true;
    for (const auto& [member, report] : reports_.done) {
      if (!report.has_all) {
        out.text = out.has_all ? report.text : out.text;
        out.has_all = false;
        out.numbers.insert(out.numbers.end(), report.numbers.begin(), report.numbers.end());
      }
    }
    if (out.has_all && !options_.is_source) {
      held_ = out.attempt.version;
      newest_ = held_;
      Message holds;
      holds.kind = Kind::kHolds;
      holds.attempt = out.attempt;
      tellRanks(holds);
    }
  } else if (!reports_.has_answered && reports_.accepted.size() == count) {
    out.kind = Kind::kAccept;
    const std::string& first = reports_.accepted.begin()->second;
    const bool agree = std::all_of(reports_.accepted.begin(), reports_.accepted.end(), [&](const auto& entry) { return entry.second == first; });
    out.text = agree ? first : "the ranks of " + own_->str() + " make different plans";
    reports_.has_answered = true;
  } else {
    // A rank that cannot begin stands for its party: the others have not begun.
    const bool has_failed = std::any_of(reports_.done.begin(), reports_.done.end(), [](const auto& entry) { return !entry.second.has_all; });
    if (!has_failed || reports_.has_answered || reports_.accepted.size() + reports_.done.size() < count) {
      return;
    }
    out = reports_.done.begin()->second;
    reports_.has_answered = true;
  }
  if (publisher_ != nullptr) {
    publisher_->hear(own_->number, out);
  } else {
    tellSource(out);
  }
}

void Node::onSwap(int32_t from, uint64_t count) {
  if (!own_.has_value() || !leads() || !own_->has(from)) {
    return;
  }
  swaps_[from] = count;
  if (swaps_.size() < own_->members.size()) {
    return;
  }
  const auto least = std::min_element(swaps_.begin(), swaps_.end(), [](const auto& a, const auto& b) { return a.second < b.second; })->second;
  while (num_swapped_ < least) {
    Message swapped;
    swapped.kind = Kind::kSwapped;
    swapped.count = ++num_swapped_;
    swapped.attempt.version = held_;
    swapped.numbers = {newest_};
    tellRanks(swapped);
  }
}

void Node::breakParty(const std::string& why) {
  is_broken_ = true;
  if (leads()) {
    Message over;
    over.text = why;
    const auto tellOther = [&](int32_t member, Kind kind) {
      if (member != options_.self.number) {
        over.kind = kind;
        tell(member, over);
      }
    };
    for (const auto& [rank, member] : entered_) {
      tellOther(member.number, Kind::kBroken);
    }
    for (const auto& [leader, party] : party_of_leader_) {
      tellOther(leader, Kind::kSourceLost);
    }
    if (source_leader_ >= 0) {
      tellOther(source_leader_, Kind::kBroken);
    }
  }
  events_.onBroken(why);
}

void Node::lose(int32_t peer, const std::string& reason) {
  if (is_broken_) {
    return;
  }
  const bool is_of_own_party = own_.has_value() ? own_->has(peer)
                                                : peer == leader_ || std::any_of(entered_.begin(), entered_.end(),
                                                                                 [&](const auto& entry) { return entry.second.number == peer; });
  if (is_of_own_party && (leads() || peer == leader_)) {
    breakParty((options_.is_source ? "a rank of the source" : "a rank of replica '" + options_.replica + "'") + std::string(" is lost: ") + reason);
    return;
  }
  if (peer == source_leader_) {
    source_leader_ = -1;
    Message gone;
    gone.kind = Kind::kSourceLost;
    gone.text = reason;
    tellRanks(gone);
    return;
  }
  if (const auto found = party_of_leader_.find(peer); found != party_of_leader_.end()) {
    const uint64_t party = found->second;
    party_of_leader_.erase(found);
    publisher_->lose(party);
  }
  early_.erase(peer);
}

}  // namespace xmesh::runtime::link
