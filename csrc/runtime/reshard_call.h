#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "runtime/agreement/messages.h"
#include "runtime/failure.h"
#include "runtime/prepared_plan.h"

namespace xmesh::runtime {

/// What begin() is given for one call.
struct CallRequest {
  std::shared_ptr<const PreparedPlan> prepared;
  std::vector<LocalTensor> src;
  std::vector<LocalTensor> dst;
  uint64_t lane = 0;                      ///< 0, or backwardLane() of the forward call
  std::chrono::milliseconds timeout{0};   ///< 0: none
  bool is_detached = false;               ///< its caller waits for its own messages at most; close() waits for the end
  std::optional<CallKey> key;             ///< of a call that its maker numbers: the same on every participant, never used twice
  bool is_agreed = false;                 ///< the participants know already that they make the same call: they do not compare
  bool is_held = false;                   ///< begins with the next call that is not held, or with ReshardService::flush()
  bool is_watch = false;                  ///< moves nothing and lasts until release() or a failure; see ReshardService
  uint64_t arrival = 0;                   ///< of a watch: which pipeline of its participants it is of, as arrive() said; 0: of none
  std::optional<CallKey> watch;           ///< the watch that this call fails with, and that fails with this call
  uint64_t turn = 0;                      ///< with a watch whose ranks work turn by turn: the call's, never less than that of one before it
  std::function<std::string()> describe;  ///< what the call is, or for a watch what this rank does now: for error texts, on the network's thread
  std::shared_ptr<void> keep_alive;       ///< owns the tensors' memory until the call has ended; dropped on the network's thread
};

/// A reshard in flight as its caller sees it. Every method may be called from any thread.
class ReshardCall {
 public:
  ReshardCall(CallKey key, CallRequest request) : key_(key), is_detached_(request.is_detached), request_(std::move(request)) {}
  const CallKey& key() const { return key_; }
  /// Its caller does not wait for its end.
  bool isDetached() const { return is_detached_; }
  bool isCompleted() const { return is_completed_.load(std::memory_order_acquire); }
  /// The failure of a call that has completed with one.
  std::optional<Failure> failure() const { return isCompleted() ? failure_ : std::nullopt; }
  /// When a call that has completed did so.
  std::chrono::steady_clock::time_point endedAt() const { return ended_at_; }
  /// Blocks until the call has ended (its own timeout bounds that); throws what it failed with. With a timeout above zero gives up
  /// waiting after it (returns false; the call goes on).
  bool wait(std::chrono::milliseconds timeout = std::chrono::milliseconds(0));
  /// As wait(), but only until this rank's own messages are sent and received: the tensors are its caller's again, whatever the others still have to
  /// do.
  bool waitMoved(std::chrono::milliseconds timeout = std::chrono::milliseconds(0));
  /// Runs `callback` when the call ends: on the network's thread, or at once if it has ended.
  void onCompletion(std::function<void()> callback);
  /// What was asked for, once; for the service, on the network's thread.
  CallRequest takeRequest() { return std::move(request_); }
  /// Wakes who waits in waitMoved(); for the service, which does so at most once, before complete().
  void markMoved();
  /// Ends the call, once; for the service, which holds it meanwhile.
  void complete(std::optional<Failure> failure);

 private:
  bool waitFor(std::chrono::milliseconds timeout, bool until_moved);

  const CallKey key_;
  const bool is_detached_;
  CallRequest request_;  ///< the network's thread only
  std::mutex mutex_;     ///< guards the callbacks, and the completion against waiters that are about to sleep
  std::condition_variable ended_;
  std::vector<std::function<void()>> callbacks_;
  std::atomic<bool> is_moved_ = false;
  std::atomic<bool> is_completed_ = false;
  // Written before is_completed_, never after.
  std::optional<Failure> failure_;
  std::chrono::steady_clock::time_point ended_at_;
};

}  // namespace xmesh::runtime
