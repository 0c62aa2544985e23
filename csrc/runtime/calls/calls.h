#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/agreement/arrivals.h"
#include "runtime/agreement/call_history.h"
#include "runtime/agreement/inquiry.h"
#include "runtime/agreement/messages.h"
#include "runtime/agreement/participants.h"
#include "runtime/agreement/peers.h"
#include "runtime/agreement/refusals.h"
#include "runtime/agreement/rounds.h"
#include "runtime/agreement/watch.h"
#include "runtime/calls/reshard_call.h"
#include "runtime/executors_by_route.h"
#include "transport/control_network.h"

namespace xmesh::runtime {

/// What a call is: see the requests of the same names.
enum class CallKind : uint8_t { kReshard, kTransfer, kMeeting, kWatch };

/// One call of this rank, from its request to its end. Threading: its maker's, then the network's thread.
struct Call {
  CallKind kind = CallKind::kReshard;
  CallKey key;
  std::shared_ptr<ReshardCall> handle;
  std::shared_ptr<const CallTerms> terms;
  std::chrono::milliseconds timeout{0};
  std::function<std::string()> describe;  ///< for a transfer or a watch; may be null
  std::optional<CallKey> watch;           ///< the one that it fails with
  uint64_t phase = 0;                     ///< the phase of that watch
  uint64_t pipeline = 0;                  ///< for a watch, its pipeline
  std::optional<Movement> movement;       ///< until it starts

  std::unique_ptr<Executor> executor;  ///< null where nothing moves
  bool waits_for_agreement = false;    ///< before that executor starts
  bool knows_progress = true;          ///< what that executor says
  StartTerms start_terms;              ///< the most that a participant has said
  bool is_moved = false;               ///< all messages sent and received
  AgreementRounds rounds;
  Watch watched;  ///< used if the call is a watch
  Inquiry inquiry;
  uint64_t timer = 0;
};

/// The calls of one rank that are in flight. A call ends when its own messages are done and every participant has been found to make the same call.
/// It fails on every participant when one finds a disagreement, loses a peer that it still needs, or waits longer than its timeout; then the ranks
/// that do not answer are named. Threading: the network's thread.
class Calls {
 public:
  Calls(Peers& peers, CallHistory& history, Refusals& refusals, Arrivals& arrivals)
      : peers_(peers), history_(history), refusals_(refusals), arrivals_(arrivals) {}
  /// Once, before the first call.
  void connect(transport::ControlNetwork& network, ExecutorsByRoute& executors) {
    network_ = &network;
    executors_ = &executors;
  }

  /// A failure to start is one of the call.
  void start(Call call);
  /// Ends a call with a failure; with `tell` every other participant hears of it. No-op once it has ended.
  void fail(const CallKey& key, const Failure& failure, bool tell = true);
  /// Ends a watch in peace; the others get `farewell`, if any, once they come to its phase.
  void release(const CallKey& watch, const std::optional<Failure>& farewell);
  /// Asks the participants of a call what they do about it, and fails it with what they say.
  void askAround(const CallKey& key);
  void hear(int32_t peer, CallNotice notice);
  void hear(int32_t peer, FailNotice notice);
  void hear(int32_t peer, const Question& question);
  void hear(int32_t peer, Answer answer);
  void hear(int32_t peer, Arrival arrival);
  void hear(int32_t peer, const UnnamedRefusals& unnamed);
  void hear(int32_t peer, const TurnRequest& request);
  /// Fails the calls that still need the peer.
  void lose(int32_t peer, const LostPeer& lost, bool is_goodbye);
  /// Before this rank says goodbye: tells the others of calls whose messages it still owes where they could not see that.
  void tellUndone();
  /// Gives all up, after the network has been destroyed.
  void abandon();

 private:
  void begin(Call& call);
  void makeExecutor(Call& call);
  /// The stream of a call's executor was broken off.
  void breakOff(const CallKey& key, const std::string& reason, int32_t peer);
  void sendNotice(const Call& call);
  void advanceAgreement(const CallKey& key);
  void finishIfDone(const CallKey& key);
  /// Joins a call to the watch that it names; false if that has failed, and the call with it.
  bool joinWatch(const Call& call);
  /// A call takes its watch along, a watch all its calls.
  void failWithWatch(const Call& call, const Failure& failure);
  void concludeInquiry(const CallKey& key);
  Answer answerTo(const Question& question) const;
  bool needs(const Call& call, int32_t peer, bool is_goodbye) const;
  static std::string progressOf(const Call& call);
  std::string textOf(const Call& call) const;
  void end(Call& call, const std::optional<Failure>& failure);

  Peers& peers_;
  CallHistory& history_;
  Refusals& refusals_;
  Arrivals& arrivals_;
  transport::ControlNetwork* network_ = nullptr;
  ExecutorsByRoute* executors_ = nullptr;
  std::map<CallKey, Call> calls_;
  std::optional<Failure> last_peer_failure_;  ///< the last PeerError of this rank
};

}  // namespace xmesh::runtime
