#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "core/topology.h"
#include "runtime/agreement/rank_numbers.h"

namespace xmesh::c10d_backend {

/// The ranks of a process group as one of them finds the others: each says in the group's store where it listens and on which host it is, once.
/// Threading: any thread at any time.
class Members {
 public:
  /// Told where a rank listens, before it counts as found.
  using Found = std::function<void(int32_t peer, const std::string& address)>;
  enum class AwaitedFor : uint8_t { kReshard, kPipeline };  ///< what those that are missing are said not to have done
  struct Wait {
    std::chrono::milliseconds timeout{0};  ///< 0: none
    AwaitedFor why = AwaitedFor::kReshard;
    std::function<void()> check = {};  ///< called again and again meanwhile; may throw
  };

  Members(c10::intrusive_ptr<::c10d::Store> group_store, runtime::RankNumbers numbers, int32_t own_peer, Found found);

  /// This rank is there. `host_id`: which host it is on; empty to discover it.
  void publish(const std::string& address, const std::string& host_id);
  /// Waits until all `ranks` (global) have published. PeerError when one has left instead, or at the timeout; InvalidArgument for a rank outside the
  /// group.
  void find(const std::vector<int64_t>& ranks, const Wait& wait);
  /// As find() for those that are there already; waits for nobody.
  void findPresent(const std::vector<int64_t>& ranks);
  bool areMembers(const std::vector<int64_t>& ranks) const;
  /// Which host each of `ranks` is on, all of which have been found; hosts are numbered in order of their lowest rank.
  core::Topology topology(std::vector<int64_t> ranks, const core::LinkModel& links) const;
  /// The members' own part of the group's store.
  const c10::intrusive_ptr<::c10d::Store>& store() const { return store_; }

 private:
  void await(std::vector<int64_t> missing, const Wait& wait);
  bool isFound(int64_t rank) const;
  std::string keyOf(int64_t rank) const;

  const c10::intrusive_ptr<::c10d::Store> group_store_;
  const c10::intrusive_ptr<::c10d::Store> store_;
  const runtime::RankNumbers numbers_;
  const int32_t own_peer_;
  const Found found_;
  mutable std::mutex mutex_;
  std::map<int64_t, std::string> host_of_;  ///< by global rank; those found so far
};

}  // namespace xmesh::c10d_backend
