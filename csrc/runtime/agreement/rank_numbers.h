#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"

namespace xmesh::runtime {

/// How ranks are numbered: a network knows peers, plans and texts have global ranks. Where ranks come and go there is one number for both, which
/// nobody has again. Immutable.
class RankNumbers {
 public:
  /// Peers and global ranks are the same numbers.
  RankNumbers() = default;
  /// Those of a group: peers are group ranks, whose global ranks these are, in order.
  // NOLINTNEXTLINE(google-explicit-constructor)
  RankNumbers(std::vector<int64_t> global_ranks) : has_group_(true), global_ranks_(std::move(global_ranks)) {
    for (size_t i = 0; i < global_ranks_.size(); ++i) {
      peers_[global_ranks_[i]] = static_cast<int32_t>(i);
    }
  }

  int64_t globalRank(int32_t peer) const { return has_group_ ? global_ranks_.at(static_cast<size_t>(peer)) : peer; }
  bool contains(int64_t global_rank) const { return !has_group_ || peers_.contains(global_rank); }
  /// Throws InvalidArgument for a rank outside the group.
  int32_t peerOf(int64_t global_rank) const {
    if (!has_group_) {
      return static_cast<int32_t>(global_rank);
    }
    const auto found = peers_.find(global_rank);
    core::require(found != peers_.end(), "rank " + std::to_string(global_rank) + " of a mesh is not in the process group");
    return found->second;
  }
  std::vector<int32_t> peersOf(const std::vector<int64_t>& global_ranks) const {
    std::vector<int32_t> out;
    out.reserve(global_ranks.size());
    for (const int64_t rank : global_ranks) {
      out.push_back(peerOf(rank));
    }
    return out;
  }
  /// Of a group, all its ranks; else none.
  const std::vector<int64_t>& globalRanks() const { return global_ranks_; }

 private:
  bool has_group_ = false;
  std::vector<int64_t> global_ranks_;  ///< by peer
  std::map<int64_t, int32_t> peers_;   ///< by global rank
};

}  // namespace xmesh::runtime
