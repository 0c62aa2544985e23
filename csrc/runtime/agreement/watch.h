#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <utility>

#include "runtime/agreement/messages.h"

namespace xmesh::runtime {

/// The calls of one rank that fail together, and with those of the other ranks. They come in phases, which all ranks number alike: a rank that
/// refuses its part in a phase has done its part in those before, so that its failure waits here for this rank to come to that phase. Threading: the
/// network's thread.
class Watch {
 public:
  /// A call of a phase begins; what it fails with, and the watch, if that phase has failed elsewhere.
  std::optional<Failure> join(const CallKey& call, uint64_t phase) {
    calls_.insert(call);
    phase_ = std::max(phase_, phase);
    return coming_.has_value() && coming_->phase <= phase_ ? coming_ : std::nullopt;
  }
  void leave(const CallKey& call) { calls_.erase(call); }
  /// Whether a failure that a peer tells of is for now; else it is kept for its phase. The first one counts.
  bool isDue(int32_t peer, const Failure& failure) {
    if (failure.phase <= phase_) {
      return true;
    }
    if (!coming_.has_value()) {
      coming_ = failure;
    }
    told_by_.insert(peer);
    return false;
  }
  /// What a peer that is lost now had told of before; nothing where it had told nothing.
  std::optional<Failure> toldBy(int32_t peer) const { return told_by_.contains(peer) ? coming_ : std::nullopt; }
  const std::set<CallKey>& calls() const { return calls_; }

 private:
  std::set<CallKey> calls_;
  uint64_t phase_ = 0;  ///< the latest of theirs
  std::optional<Failure> coming_;
  std::set<int32_t> told_by_;
};

}  // namespace xmesh::runtime
