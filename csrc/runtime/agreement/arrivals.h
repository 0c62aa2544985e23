#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/agreement/call_history.h"
#include "runtime/agreement/mailbox.h"
#include "runtime/agreement/messages.h"
#include "runtime/agreement/peers.h"

namespace xmesh::runtime {

/// How the ranks of a pipeline find each other before they share a watch. Each counts the pipelines of every set of ranks that it makes, and tells
/// those ranks: "my second one of [0, 1, 2]". Where no two disagree, their counts are equal. A rank that waits at one pipeline for another which has
/// not arrived there knows that it will not come, if that one waits for it at a pipeline that it has not made, or could make none:
///
///     rank 0 makes pipeline 1 of [0, 1]      -> rank 1: "my first one of [0, 1]" (Arrival)
///     rank 1 makes pipeline 1 of [0, 1, 2]   -> ranks 0, 2: "my first one of [0, 1, 2]"
///     rank 0 hears that: rank 1 waits for it where it has not been -> "ranks disagree on meshes", to all of [0, 1] (FailNotice)
///
/// Such a failure names the arrival that it came of, which then has no further effect; what either rank makes next has equal numbers on both. A rank
/// that could make none says so, and does not know which pipelines of the others fail by that: before its next one it asks them (settleFailed()).
///
/// Threading: the first group of methods on any thread; the second on the network's.
class Arrivals {
 public:
  Arrivals(Mailbox& mailbox, Peers& peers, CallHistory& history) : mailbox_(mailbox), peers_(peers), history_(history) {}

  /// This rank makes a pipeline of `ranks` (global, ascending): tells those of `peers` that can be reached, and says the how many-th of these ranks
  /// it is. With a failure it could not: this rank is not among `ranks`, or they are not known (none given). Throws GroupError when closed.
  uint64_t arrive(const std::vector<int64_t>& ranks, const std::vector<int32_t>& peers, std::optional<Failure> failure = std::nullopt);
  /// Ready once those of `peers` that heard of this rank's failures have said which of their pipelines failed by them, or are lost: before it arrives
  /// with them again.
  std::future<void> settleFailed(const std::vector<int32_t>& peers);
  /// Why a pipeline that this rank has arrived at, and whose watch it has not begun, cannot be made, if that is known. Waits for the network's
  /// thread.
  std::optional<Failure> failureBefore(const std::vector<int64_t>& ranks, uint64_t count);
  /// This rank gives such a pipeline up, and tells those of `peers` that can be reached.
  void abandon(const std::vector<int64_t>& ranks, uint64_t count, const std::vector<int32_t>& peers, const Failure& failure);

  /// A watch of this rank's, and what it fails with.
  using FailedWatch = std::pair<CallKey, Failure>;
  /// The watch of a pipeline begins; what it fails with, if its ranks are known not to come together. `peers`: theirs.
  std::optional<Failure> begin(const CallKey& watch, const std::vector<int64_t>& ranks, const std::vector<int32_t>& peers, uint64_t count);
  void end(const CallKey& watch) { watches_.erase(watch); }
  /// Whether a peer has arrived at the pipeline of a watch that has begun.
  bool hasArrived(int32_t peer, const CallKey& watch) const;
  /// A peer arrives somewhere; the watches that fail by it.
  std::vector<FailedWatch> hear(int32_t peer, Arrival arrival);
  void hear(int32_t peer, const Return& coming);
  void lose(int32_t peer);
  /// A call of this rank's has failed: where that came of a peer's arrival elsewhere this has no other effect, and at other pipelines that failed by
  /// it this rank is not waited for.
  void settle(const CallKey& call, const Failure& failure);
  /// Whether a call of this rank's has failed by the arrival that a failure names.
  bool hasFailedBy(const Failure& failure) const { return failed_by_.contains({failure.arrived_peer, failure.arrival}); }
  /// A pipeline has failed, at which this rank was not and will not be.
  void passOver(const CallKey& watch);
  /// The network is gone: nobody is waited for.
  void close();
  /// A pipeline at which this rank was not has failed by an arrival of this rank's: those of others there have no other effect, and where it arrived
  /// nobody will come. The watch that fails by it, if it has begun.
  std::optional<FailedWatch> takeBlame(const FailNotice& notice);

 private:
  /// Where this rank has arrived, and who knows.
  struct OwnArrival {
    Arrival arrival;
    std::set<int32_t> told;
  };
  struct Waiting {
    std::vector<int64_t> ranks;
    uint64_t count = 0;
  };

  void tell(OwnArrival& own, int32_t peer);
  bool hasArrived(int32_t peer, const Waiting& at) const;
  /// Why a pipeline that some of its ranks have not arrived at cannot be made; what it says is not said again.
  std::optional<Failure> conflictAt(const Waiting& here);
  std::optional<Failure> conflictOf(const Arrival& arrival, int32_t peer, const Waiting& here);
  /// This rank's part in that pipeline has failed with it: the next one that both make has the same number on both.
  void countSettled(const Arrival& arrival);
  void releaseWaiter();

  Mailbox& mailbox_;
  Peers& peers_;
  CallHistory& history_;

  std::mutex mutex_;                                       ///< guards the two below
  std::map<std::vector<int64_t>, uint64_t> num_arrivals_;  ///< how often this rank has arrived, by the pipeline's ranks
  bool has_failed_ = false;                                ///< some of them were failures

  // The network's thread only.
  std::map<CallKey, Waiting> watches_;  ///< watches of pipelines that are begun and not ended
  std::deque<OwnArrival> own_;          ///< the last of this rank's
  uint64_t num_own_ = 0;
  std::map<int32_t, std::deque<Arrival>> heard_;      ///< by peer, its last arrivals
  std::set<std::pair<int32_t, uint64_t>> settled_;    ///< arrivals that have not come yet, but are settled: by peer and number
  std::set<std::pair<int32_t, uint64_t>> failed_by_;  ///< arrivals by which calls of this rank's have failed: by peer and number
  std::map<int32_t, uint64_t> unsettled_;             ///< by peer: the last failure of this rank's that it heard of and has not answered
  struct Waiter {
    std::promise<void> settled;
    std::vector<int32_t> peers;
  };
  std::optional<Waiter> waiter_;
};

}  // namespace xmesh::runtime
