#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "transport/host_transport.h"
#include "transport/operation.h"

namespace xmesh::transport {

/// Which operations are open, which were closed lately, and what peers said about operations that are not open yet. What it remembers of
/// operations that are not open is bounded: the oldest go first.
class OperationTable {
 public:
  struct Open {
    OperationEvents* events = nullptr;
    std::vector<int32_t> peers;  ///< those it has had anything to do with
  };
  /// Per peer: how many receives it has posted for messages from here.
  using Credits = std::map<int32_t, int64_t>;
  static constexpr size_t kMaxRemembered = size_t{1} << 17;  ///< a call takes up to runtime::kNumTracks operations

  Open* find(OperationId operation) {
    const auto found = open_.find(operation);
    return found == open_.end() ? nullptr : &found->second;
  }
  bool wasClosed(OperationId operation) const { return closed_.contains(operation); }
  const std::unordered_map<OperationId, Open>& all() const { return open_; }

  /// Returns what peers have said already.
  Credits open(OperationId operation, OperationEvents& events) {
    open_.emplace(operation, Open{&events, {}});
    const auto early = early_.extract(operation);
    return early.empty() ? Credits{} : early.mapped();
  }
  void close(OperationId operation) {
    if (open_.erase(operation) != 0 && closed_.insert(operation).second) {
      closed_order_.push_back(operation);
      if (closed_order_.size() > kMaxRemembered) {
        closed_.erase(closed_order_.front());
        closed_order_.pop_front();
      }
    }
  }
  /// Keeps `count` for an operation that is neither open nor known to be closed.
  void rememberCredit(OperationId operation, int32_t peer, int64_t count) {
    const auto [entry, is_new] = early_.try_emplace(operation);
    entry->second[peer] = count;
    if (is_new) {
      early_order_.push_back(operation);
      if (early_order_.size() > kMaxRemembered) {
        early_.erase(early_order_.front());
        early_order_.pop_front();
      }
    }
  }
  void touch(Open& operation, int32_t peer) {
    for (const int32_t known : operation.peers) {
      if (known == peer) {
        return;
      }
    }
    operation.peers.push_back(peer);
  }

 private:
  std::unordered_map<OperationId, Open> open_;
  std::unordered_set<OperationId> closed_;
  std::deque<OperationId> closed_order_;
  std::unordered_map<OperationId, Credits> early_;
  std::deque<OperationId> early_order_;  ///< may name operations that were opened since
};

}  // namespace xmesh::transport
