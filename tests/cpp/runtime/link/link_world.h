#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "runtime/link/node.h"
#include "transport/fakes/fake_host_network.h"

namespace xmesh::runtime::link::test {

class LinkWorld;

/// A process of a link on the fake network. It moves no bytes: a version has come to it once all members of the attempt were told to go, and live.
class Process final : public transport::PeerEvents, public NodeEvents {
 public:
  Process(LinkWorld& world, Node::Options options, int32_t leader);

  Node& node() { return *node_; }
  transport::ControlNetwork& network() { return *network_; }
  void onControl(int32_t peer, std::string message) override {
    if (isLinkMessage(message)) {
      node_->hear(peer, message);
    }
  }
  void onPeerLost(int32_t peer, const std::string& reason, bool /*is_goodbye*/) override { node_->lose(peer, reason); }

  const Node::Options options;
  std::optional<Party> party;
  std::set<uint64_t> known;
  std::set<uint64_t> received;             ///< versions whose bytes have all been here
  uint64_t shadow = 0;                     ///< the one whose bytes are all here now
  std::vector<uint64_t> held;              ///< onHeld, in order
  std::map<uint64_t, uint64_t> swapped;    ///< by count
  std::map<uint64_t, Settlement> settled;  ///< by version
  std::vector<std::string> left_out;
  std::string broken;
  int num_source_losses = 0;
  uint64_t num_swaps = 0;
  std::string refuses;     ///< says this to every offer
  std::string other_plan;  ///< is part of its fingerprint
  bool is_dead = false;
  bool is_stopped = false;

 private:
  friend class LinkWorld;
  void onFormed(const Party& own) override { party = own; }
  void onKnown(const Party& one) override { known.insert(one.number); }
  void onForgotten(uint64_t number) override { known.erase(number); }
  void onOffer(const Attempt& attempt, const std::vector<Party>& parties) override;
  void onGo(const Attempt& attempt) override;
  void onAbort(const Attempt& attempt) override {
    if (attempt == current_ && is_going_) {
      is_going_ = false;
      node_->done(attempt, false, "aborted");
    }
  }
  void onHeld(uint64_t version) override {
    EXPECT_EQ(shadow, version);
    held.push_back(version);
  }
  void onSettled(const Settlement& settlement) override { settled[settlement.version] = settlement; }
  void onSwapped(uint64_t count, uint64_t version, uint64_t newest) override {
    EXPECT_LE(count, num_swaps);
    EXPECT_TRUE(version == 0 || shadow == version);
    EXPECT_EQ(newest, held.empty() ? 0 : held.back());
    swapped[count] = version;
  }
  void onLeftOut(const std::string& why) override { left_out.push_back(why); }
  void onBroken(const std::string& why) override { broken = why; }
  void onSourceLost(const std::string& /*why*/) override { ++num_source_losses; }
  /// Ends this process's part of an attempt where it can: all have gone, or one is dead, or (late) one has not come.
  void look(bool is_late);

  LinkWorld& world_;
  std::unique_ptr<Node> node_;
  std::unique_ptr<transport::PeerNetwork> network_;
  Attempt current_;
  std::vector<int32_t> members_;  ///< of the current attempt
  bool is_going_ = false;
};

/// Parties of processes, all in one thread, in any order that the seed gives.
class LinkWorld {
 public:
  static constexpr std::chrono::milliseconds kDeadline{1000};

  LinkWorld(int32_t most_processes, uint64_t seed) : rng(seed), network_(most_processes, seed) {}

  /// Starts a party; its ranks enter in any order. Returns its processes, by rank.
  std::vector<Process*> start(bool is_source, const std::string& replica, int32_t size) {
    const int32_t leader = next_;
    std::vector<Process*> out;
    for (int32_t rank = 0; rank < size; ++rank) {
      Node::Options options;
      options.self = {next_, "fake:" + std::to_string(next_), "host", "manifest " + std::to_string(next_)};
      options.is_source = is_source;
      options.replica = replica;
      options.rank = rank;
      options.size = size;
      options.party = static_cast<uint64_t>(1000 + leader);
      options.deadline = kDeadline;
      processes.push_back(std::make_unique<Process>(*this, options, leader));
      out.push_back(processes.back().get());
      ++next_;
    }
    return out;
  }
  transport::FakeHostNetwork& network() { return network_; }
  /// Until nothing happens, however far the clock must go for that.
  void settle() {
    network_.runUntilIdle();
    for (int i = 0; i < 40; ++i) {
      network_.advance(kDeadline);
    }
  }
  void kill(Process& process) {
    process.is_dead = true;
    network_.kill(process.options.self.number);
  }
  void stop(Process& process) {
    process.is_stopped = true;
    network_.stop(process.options.self.number);
  }
  void resume(Process& process) {
    process.is_stopped = false;
    network_.resume(process.options.self.number);
  }
  Process& at(int32_t number) { return *processes.at(static_cast<size_t>(number)); }

  std::mt19937_64 rng;
  std::vector<std::unique_ptr<Process>> processes;
  std::map<std::tuple<uint64_t, uint64_t, uint32_t>, std::set<int32_t>> gone;  ///< by attempt: who was told to go

 private:
  friend class Process;
  transport::FakeHostNetwork network_;
  int32_t next_ = 0;
};

inline Process::Process(LinkWorld& world, Node::Options given, int32_t leader) : options(std::move(given)), world_(world) {
  network_ = world.network_.join(options.self.number, *this);
  node_ = std::make_unique<Node>(options, *network_, *this);
  network_->post([this, leader] {
    if (leader != options.self.number) {
      network_->setAddress(leader, "fake:" + std::to_string(leader));
    }
    node_->enter(leader);
  });
}

inline void Process::onOffer(const Attempt& attempt, const std::vector<Party>& parties) {
  current_ = attempt;
  is_going_ = false;
  members_.clear();
  std::string fingerprint = other_plan;
  for (const Party& one : parties) {
    for (const Member& member : one.members) {
      members_.push_back(member.number);
      fingerprint += member.manifest + ";";
    }
  }
  network_->post([this, attempt, fingerprint] {
    if (refuses.empty()) {
      node_->accept(attempt, fingerprint);
    } else {
      node_->done(attempt, false, refuses);
    }
  });
}

inline void Process::onGo(const Attempt& attempt) {
  if (attempt != current_) {
    return;
  }
  is_going_ = true;
  shadow = 0;  // it is overwritten
  world_.gone[{attempt.source, attempt.version, attempt.number}].insert(options.self.number);
  network_->startTimer(LinkWorld::kDeadline, [this, attempt] {
    if (attempt == current_) {
      look(/*is_late=*/true);
    }
  });
  for (const int32_t member : members_) {  // now it may have come to any of them
    Process& other = world_.at(member);
    other.network_->post([&other] { other.look(/*is_late=*/false); });
  }
  look(/*is_late=*/false);
}

inline void Process::look(bool is_late) {
  if (!is_going_) {
    return;
  }
  const std::set<int32_t>& gone = world_.gone[{current_.source, current_.version, current_.number}];
  std::vector<int32_t> blamed;
  bool have_all_gone = true;
  for (const int32_t member : members_) {
    const Process& other = world_.at(member);
    if (other.is_dead || (is_late && !gone.contains(member))) {
      blamed.push_back(member);
    }
    have_all_gone = have_all_gone && gone.contains(member);
  }
  if (have_all_gone) {  // it has left them all, even those that have died since
    received.insert(current_.version);
    shadow = current_.version;
    is_going_ = false;
    node_->done(current_, true);
  } else if (!blamed.empty()) {
    is_going_ = false;
    node_->done(current_, false, "a peer is lost", blamed);
  }
}

}  // namespace xmesh::runtime::link::test
