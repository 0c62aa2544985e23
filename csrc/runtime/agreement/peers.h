#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/agreement/messages.h"
#include "runtime/agreement/rank_numbers.h"
#include "transport/control_network.h"

namespace xmesh::runtime {

/// Why a peer cannot be reckoned with any more.
struct LostPeer {
  std::string reason;
  std::vector<int64_t> blamed_ranks;  ///< itself, or those whose fault made it leave
};

/// The other ranks of a group as its calls see them: how to tell them something, and which are gone. Threading: the network's thread, the rank
/// numbers excepted.
class Peers {
 public:
  Peers(RankNumbers numbers, int32_t group_rank) : numbers_(std::move(numbers)), group_rank_(group_rank) {}
  /// Once, before anything is sent. `address`: where the others reach this rank.
  void connect(transport::ControlNetwork& network, std::string address) {
    network_ = &network;
    address_ = std::move(address);
  }

  int32_t groupRank() const { return group_rank_; }
  int64_t globalRank(int32_t peer) const { return numbers_.globalRank(peer); }
  int64_t myGlobalRank() const { return globalRank(group_rank_); }

  /// Whether the peer is another rank, is not lost, and can be reached.
  bool isReachable(int32_t peer) const { return peer != group_rank_ && !lost_.contains(peer) && network_->hasAddress(peer); }
  void setAddress(int32_t peer, const std::string& address) { network_->setAddress(peer, address); }
  /// Where a peer says it is.
  void hear(int32_t peer, const Introduction& introduction) {
    if (!network_->hasAddress(peer)) {
      network_->setAddress(peer, introduction.address);
    }
  }
  /// Tells the peer if it is reachable, and before that, once, where this rank is.
  void tell(int32_t peer, const std::string& message) {
    if (!isReachable(peer)) {
      return;
    }
    if (introduced_.insert(peer).second) {
      network_->sendControl(peer, encode(Introduction{address_}));
    }
    network_->sendControl(peer, message);
  }
  void tell(const std::vector<int32_t>& peers, const std::string& message) {
    for (const int32_t peer : peers) {
      tell(peer, message);
    }
  }

  /// A peer told of a failure by others: if it leaves, it leaves for that.
  void heardFailure(int32_t peer, const Failure& failure) { failures_[peer] = failure; }
  const LostPeer& lose(int32_t peer, const std::string& reason, bool is_goodbye) {
    LostPeer lost{is_goodbye ? "it has left the group" : reason, {globalRank(peer)}};
    if (const auto told = failures_.find(peer); is_goodbye && told != failures_.end()) {
      lost.reason += " after this: " + told->second.text;
      lost.blamed_ranks = told->second.blamed_ranks;
    }
    return lost_.emplace(peer, std::move(lost)).first->second;
  }
  bool isLost(int32_t peer) const { return lost_.contains(peer); }
  const std::map<int32_t, LostPeer>& lost() const { return lost_; }

 private:
  const RankNumbers numbers_;
  const int32_t group_rank_;
  transport::ControlNetwork* network_ = nullptr;
  std::string address_;
  std::set<int32_t> introduced_;
  std::map<int32_t, LostPeer> lost_;
  std::map<int32_t, Failure> failures_;  ///< by peer: the last PeerError that it told of
};

}  // namespace xmesh::runtime
