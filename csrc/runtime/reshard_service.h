#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "runtime/agreement/messages.h"
#include "runtime/executor.h"
#include "runtime/reshard_call.h"
#include "transport/control_network.h"

namespace xmesh::runtime {

/// Runs the reshards of one rank of one group: agreement among the ranks, execution, failures, timeouts.  How calls fail is in
/// reshard_failures.cpp, how they are refused in reshard_refusals.cpp.
///
/// Threading: begin(), flush(), refuse() and close() come from the caller's thread; everything else happens on the network's thread, which alone
/// touches the calls in flight. The networks are made by `make_networks` (they need the service as their PeerEvents);
/// the control network dies in close().
///
/// A call ends when its own messages are done and every participant has been found to make the same call. It fails on every participant when one
/// finds a disagreement, loses a peer that it still needs, or waits longer than its timeout; then the ranks that do not answer are named.
///
/// A watch ties many calls together: it stands for all ranks that work on something, e.g. a pipeline. It fails on every one of its participants when
/// one of them dies, when one calls failCall() on it, or when a call that names it fails; with it fail all calls that name it, so that no rank waits
/// for a call that will not be made. A rank that refuses its part in one turn has done its part in those before: the failure waits for the others to
/// come to that turn (Failure::turn).
///
/// Before they share a watch, the ranks of a pipeline arrive (arrive(); reshard_arrivals.cpp): each tells the others that it makes this pipeline, or
/// that it could not. A watch with CallRequest::is_arrival fails where one of its ranks, which has not arrived there, waits for this one elsewhere,
/// could not make a pipeline, or leaves.
class ReshardService final : public transport::PeerEvents {
 public:
  struct Options {
    std::vector<int64_t> global_ranks;  ///< of every group rank
    int32_t group_rank = 0;
  };
  /// What carries the ranks' messages, and what moves the tensors.
  struct Networks {
    std::unique_ptr<transport::ControlNetwork> control;
    std::unique_ptr<Executors> executors;  ///< may use `control`
  };
  using MakeNetworks = std::function<Networks(transport::PeerEvents&)>;

  ReshardService(Options options, const MakeNetworks& make_networks);
  ~ReshardService() override;
  ReshardService(const ReshardService&) = delete;
  ReshardService& operator=(const ReshardService&) = delete;

  int64_t peakStagingBytes() const { return executors_->peakStagingBytes(); }

  transport::ControlNetwork& network() { return *network_; }
  /// Says where a peer listens. Throws GroupError when closed. Any thread.
  void setAddress(int32_t peer, const std::string& address);

  /// Starts a call. The addresses of all participants must be known to the network. Throws GroupError when closed.
  std::shared_ptr<ReshardCall> begin(CallRequest request);
  /// Starts the calls that were held: all of them wake the network's thread once.
  void flush();
  /// Fails a call of this rank's, and tells its participants. No-op once it has ended. Any thread.
  void failCall(const CallKey& key, Failure failure);
  /// Asks the participants of a call what they do about it; it fails with what they say as it does at its timeout. Any thread.
  void suspect(const CallKey& key);
  /// Ends a watch in peace; the others get `farewell` once they come to its turn. Any thread.
  void release(const CallKey& watch, std::optional<Failure> farewell = std::nullopt);
  /// This rank makes a pipeline of `ranks` (global, ascending): tells those of `peers` that the network can reach, and says the how many-th of these
  /// ranks it is. With a failure it could not: this rank is not among `ranks`, or they are not known (none given). `address`: where this rank
  /// listens.
  uint64_t arrive(const std::vector<int64_t>& ranks, const std::vector<int32_t>& peers, const std::string& address,
                  std::optional<Failure> failure = std::nullopt);
  /// Why a pipeline that this rank has arrived at, and whose watch it has not begun, cannot be made, if that is known. Waits for the network's
  /// thread.
  std::optional<Failure> arrivalFailure(const std::vector<int64_t>& ranks, uint64_t count);
  /// This rank gives such a pipeline up: tells those of `peers` that the network can reach.
  void abandonArrival(const std::vector<int64_t>& ranks, uint64_t count, const std::vector<int32_t>& peers, const Failure& failure);
  /// This rank refuses its next call with these participants (global ranks, ascending; this rank among them): the call counts, and the
  /// others get `text` as a ValueError instead of waiting.
  void refuse(const std::vector<int64_t>& participants, const std::vector<int32_t>& peers, const std::string& text);
  /// As refuse(), where only `ranks` of the participants (ascending, this rank left out or not) are known: it is this rank's part in the call with
  /// all of them that the others make in its place, if they do. `peers` are those to tell. See reshard_refusals.cpp.
  void refuseUnnamed(const std::vector<int64_t>& ranks, const std::vector<int32_t>& peers, const std::string& text);
  /// How many calls this rank has refused that are not known to be of a call that others made. Any thread.
  size_t numRefusals();
  /// Ready when this rank may make its next call with these participants: when what it has refused without a name is known to be of other calls, or
  /// the participants have been heard about it. The rank's caller waits for it, as long as it would for the call.
  std::future<void> settleRefusals(const std::shared_ptr<const PreparedPlan>& prepared);
  /// Waits for the detached calls (`drain` at most), fails the others with GroupError, says goodbye and joins the network's thread. Idempotent.
  /// Not to be called in a forked child, which has no such thread: leak the service there.
  void close(std::chrono::milliseconds drain) noexcept;

  void onControl(int32_t peer, std::string message) override;
  void onPeerLost(int32_t peer, const std::string& reason, bool is_goodbye) override;

 private:
  static constexpr size_t kMaxEarlyCalls = 1U << 16U;

  /// A call in flight on the network's thread.
  struct ActiveCall {
    std::shared_ptr<ReshardCall> handle;
    CallRequest request;
    std::unique_ptr<Executor> executor;
    int num_rounds = 0;
    int rounds_done = 0;
    std::map<uint8_t, Hello> hellos;  ///< that came before their round
    bool is_moved = false;            ///< all messages sent and received
    uint64_t timer = 0;
    bool is_asking = false;
    std::map<int32_t, Answer> answers;
    // Of a watch.
    std::set<CallKey> watched;              ///< the calls that name it
    uint64_t turn = 0;                      ///< the latest of theirs
    std::optional<Failure> coming_failure;  ///< of a later turn
    std::set<int32_t> told_by;              ///< who told of that
  };
  /// Why a peer cannot be reckoned with any more.
  struct LostPeer {
    std::string reason;
    std::vector<int64_t> blamed_ranks;  ///< itself, or those whose fault made it leave
  };
  /// A call that this rank refused without knowing who takes part.
  struct OwnRefusal {
    Failure failure;
    std::vector<int64_t> ranks;           ///< the participants that are known, ascending
    std::map<uint64_t, CallKey> counted;  ///< by participants: which of their calls it counts as
  };
  /// A caller who waits in settleRefusals().
  struct Waiter {
    std::shared_ptr<std::promise<void>> settled;
    std::shared_ptr<const PreparedPlan> prepared;
  };
  /// What came for a call before this rank made it.
  struct EarlyNews {
    std::vector<std::pair<int32_t, Hello>> hellos;
    std::optional<Failure> failure;
    std::vector<int64_t> participants;  ///< with the failure, where they are known
  };

  /// Where this rank has arrived, and who knows.
  struct OwnArrival {
    Arrival arrival;
    std::set<int32_t> told;
  };

  void tellArrival(OwnArrival& own, int32_t peer);
  void takeArrival(int32_t peer, Arrival arrival);
  bool hasArrived(int32_t peer, const std::vector<int64_t>& ranks, uint64_t count) const;
  /// Why a pipeline that some of its ranks have not arrived at cannot be made; what it says is not said again.
  std::optional<Failure> arrivalConflict(const std::vector<int64_t>& ranks, uint64_t count);
  std::optional<Failure> conflictOf(const Arrival& arrival, int32_t peer, const std::vector<int64_t>& ranks, uint64_t count);
  /// A pipeline has failed by a peer's arrival elsewhere, which has no other effect then.
  void settleArrival(int32_t peer, uint64_t number);
  /// The same where it failed by an arrival of this rank's: those of others there have no other effect, and where it arrived nobody will come.
  void takeBlame(const FailNotice& notice);
  void countSettled(const Arrival& arrival);
  void checkArrivals();
  /// Posts the start of the held calls; with mutex_.
  void postHeld();
  void startBegun(size_t num_calls);
  void startCall(const std::shared_ptr<ReshardCall>& handle);
  void sendHello(const CallKey& key, ActiveCall& call);
  void takeHello(int32_t peer, Hello hello);
  void advanceAgreement(const CallKey& key);
  void finishIfDone(const CallKey& key);
  /// Ends a call with a failure; with `tell` every other participant hears of it.
  void fail(const CallKey& key, const Failure& failure, bool tell);
  void takeFailNotice(int32_t peer, FailNotice notice);
  /// Joins a call to the watch that it names; false if that has failed, and the call with it.
  bool joinWatch(const CallKey& key, ActiveCall& call);
  void failWithWatch(const CallKey& key, const ActiveCall& call, const Failure& failure);
  void askAround(const CallKey& key);
  void takeAnswer(int32_t peer, Answer answer);
  void concludeTimeout(const CallKey& key);
  Answer answerTo(const Question& question) const;
  void takeQuestion(int32_t peer, const Question& question);
  void takeUnnamedRefusals(int32_t peer, const UnnamedRefusals& refusals);
  void tellRefusals();
  void tellRefusals(int32_t peer);
  /// Open refusals that may be of the participants' calls and count as none of them yet; with mutex_.
  uint64_t numUncounted(const std::vector<int64_t>& participants, uint64_t hash) const;
  /// Lets these count as the participants' next calls; with mutex_, any thread.
  void countRefusals(const std::vector<int64_t>& participants, uint64_t hash);
  /// The call is over for this rank, which refused it.
  void takeRefused(const CallKey& key, const Failure& failure);
  /// Others make, or fail in, this call: if it is one that this rank refused, the refusal is of no other.
  void nameRefusals(const CallKey& key, const std::vector<int64_t>& participants);
  /// A refusal just made may be of a call that has failed on other ranks.
  void nameByEarlyFailures();
  /// Asks a peer that has refused more calls than this rank whether it was this one.
  void askAboutRefusals(const CallKey& key, const ActiveCall& call, int32_t peer);
  /// Lets the waiting caller go on if nothing more is to be heard.
  void releaseWaiter();
  bool isPast(const CallKey& key) const;
  void remember(const CallKey& key, const Failure& failure);
  void end(ActiveCall& call, const std::optional<Failure>& failure);
  void takeControl(int32_t peer, const std::string& message);
  bool needs(const ActiveCall& call, int32_t peer, bool is_goodbye) const;
  static std::string progressOf(const ActiveCall& call);
  int64_t globalRank(int32_t peer) const { return options_.global_ranks.at(static_cast<size_t>(peer)); }
  std::string callText(const CallKey& key, const ActiveCall& call) const;
  std::unique_ptr<Executor> makeExecutor(const CallKey& key, CallRequest& request);

  const Options options_;

  std::mutex mutex_;  ///< guards the seven below: what callers' threads share
  bool is_closed_ = false;
  std::map<uint64_t, uint64_t> next_count_;
  std::deque<OwnRefusal> refusals_;  ///< open: not known to be of a call that others made; the oldest first
  std::set<std::shared_ptr<ReshardCall>> detached_;
  std::deque<std::shared_ptr<ReshardCall>> begun_;         ///< not yet started on the network's thread
  size_t num_held_ = 0;                                    ///< the last of them, whose start is not posted
  std::map<std::vector<int64_t>, uint64_t> num_arrivals_;  ///< of this rank, by the pipeline's ranks

  // The network's thread only.
  std::map<CallKey, ActiveCall> calls_;
  std::map<CallKey, EarlyNews> early_;
  std::map<uint64_t, uint64_t> started_;  ///< participants -> calls started or refused in lane 0
  std::map<CallKey, Failure> failed_;     ///< calls that failed or were refused, for ranks that make them later; the oldest are forgotten
  std::deque<CallKey> failed_order_;
  std::map<int32_t, LostPeer> lost_;
  std::map<int32_t, Failure> peer_failures_;  ///< by peer: the last PeerError that it told of; the reason if it leaves
  std::optional<Waiter> waiter_;
  std::map<int32_t, CallKey> asked_;     ///< the call that each peer asked about last
  std::set<int32_t> told_;               ///< peers that hear of this rank's open refusals
  std::map<int32_t, uint64_t> unnamed_;  ///< how many each peer has
  std::string last_call_;                ///< for answers: what this rank called last
  std::deque<OwnArrival> own_arrivals_;  ///< the last of this rank's
  uint64_t num_own_arrivals_ = 0;
  std::set<std::pair<int32_t, uint64_t>> settled_;   ///< arrivals that have not come yet, but are settled: by peer and number
  std::map<int32_t, std::deque<Arrival>> arrivals_;  ///< of each peer, the last ones

  std::unique_ptr<transport::ControlNetwork> network_;
  std::unique_ptr<Executors> executors_;
};

}  // namespace xmesh::runtime
