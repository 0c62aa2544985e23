#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "runtime/agreement/call_history.h"
#include "runtime/agreement/mailbox.h"
#include "runtime/agreement/messages.h"
#include "runtime/agreement/participants.h"
#include "runtime/agreement/peers.h"

namespace xmesh::runtime {

/// Numbers a rank's calls, and those that it refuses instead of making them.
///
/// A refusal of a call whose participants are known is that call: it counts, and they are told. A refusal without a name is of a call whose
/// participants are not known: a plain tensor has no mesh, an empty list has no tensors. A rank's calls and refusals are in the order of its program.
/// So the n-th of one rank meets the n-th of another, and a refusal without a name stands for one of the calls that it may be of. Which one, the
/// others say:
///
///     rank 3 refuses      -> all: "I have 1 refusal without a name" (UnnamedRefusals)
///     rank 0 calls number 7 of [0, 3], hears that rank 3 has refused more often than itself
///                         -> rank 3: "what about call 7 of [0, 3]?" (Question)
///     rank 3: the refusal is call 7 of [0, 3]
///                         -> rank 0: "it failed: rank 3 refused this call" (FailNotice)
///                         -> all: "I have 0 refusals without a name"
///
/// What all participants refused nobody asks about: such refusals count as one of their calls on all of them alike, once a rank makes its next call
/// with them. A rank that is about to call with refusals without a name waits (settle) until each participant has refused as often, or asks about
/// that very call.
///
/// What cannot be known: if only some ranks of a call refuse it, and these then call with others who were to have no part in it, these others cannot
/// tell that from a call of their own that was refused. They fail with the refusal's text.
///
/// Threading: the first group of methods on callers' threads, one at a time, size() on any; the second on the network's thread.
class Refusals {
 public:
  Refusals(Mailbox& mailbox, Peers& peers, CallHistory& history) : mailbox_(mailbox), peers_(peers), history_(history) {}

  /// The name of this rank's next call with these participants.
  CallKey next(const Participants& participants);
  /// This rank refuses its next call with these participants (global ranks, ascending; this rank among them). `peers`: those to tell.
  void refuse(const std::vector<int64_t>& participants, const std::vector<int32_t>& peers, const std::string& text);
  /// As refuse(), where only `ranks` of the participants (ascending, this rank left out or not) are known.
  void refuseUnnamed(const std::vector<int64_t>& ranks, const std::vector<int32_t>& peers, const std::string& text);
  /// How many refusals have no name yet.
  size_t size();
  /// Ready when this rank may make its next call with these participants.
  std::future<void> settle(const Participants& participants);

  /// Others make, or fail in, this call: if this rank refused it, that refusal has its name.
  void name(const CallKey& key, const std::vector<int64_t>& participants);
  /// A peer has so many.
  void hear(int32_t peer, const UnnamedRefusals& refusals);
  /// Asks a peer that has refused more calls than this rank whether it was this one, which this rank is in.
  void ask(const CallKey& key, const Participants& participants, int32_t peer);
  /// A peer asked about a call.
  void heardQuestion(int32_t peer, const Question& question);
  /// Tells a peer of this rank's, if it has not been told.
  void tellOnce(int32_t peer);
  /// A peer is lost, or the network has closed: who waits in settle() may go on.
  void releaseWaiter(bool is_closed = false);

 private:
  /// A call that this rank refused without knowing who takes part.
  struct Refusal {
    Failure failure;
    std::vector<int64_t> ranks;           ///< the participants that are known, ascending
    std::map<uint64_t, CallKey> counted;  ///< by participants: which of their calls it counts as
  };
  /// A caller who waits in settle().
  struct Waiter {
    std::shared_ptr<std::promise<void>> settled;
    Participants participants;
  };

  /// Lets refusals count as the participants' next calls; with mutex_.
  void count(const std::vector<int64_t>& participants, uint64_t hash);
  /// Those that may be of the participants' calls and count as none of them yet; with mutex_.
  uint64_t numUncounted(const std::vector<int64_t>& participants, uint64_t hash) const;
  /// The call is over for this rank, which refused it.
  void take(const CallKey& key, const Failure& failure);
  /// A refusal just made may be of a call that has failed on other ranks.
  void nameByEarlyFailures();
  void tellAll();
  void tell(int32_t peer);

  Mailbox& mailbox_;
  Peers& peers_;
  CallHistory& history_;

  std::mutex mutex_;  ///< guards the two below
  std::map<uint64_t, uint64_t> next_count_;
  std::deque<Refusal> refusals_;  ///< without a name; the oldest first

  // The network's thread only.
  std::optional<Waiter> waiter_;
  std::map<int32_t, CallKey> asked_;     ///< the call that each peer asked about last
  std::set<int32_t> told_;               ///< peers that hear of this rank's
  std::map<int32_t, uint64_t> unnamed_;  ///< how many each peer has
};

}  // namespace xmesh::runtime
