#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "runtime/agreement/messages.h"
#include "runtime/failure.h"
#include "runtime/fork_mark.h"

namespace xmesh::runtime {

/// A reshard in flight as its caller sees it. Every method may be called from any thread.
class ReshardCall {
 public:
  ReshardCall(CallKey key, bool is_detached) : key_(key), is_detached_(is_detached) {}
  const CallKey& key() const { return key_; }
  /// Its caller does not wait for its end.
  bool isDetached() const { return is_detached_; }
  bool isCompleted() const { return is_completed_.load(std::memory_order_acquire); }
  /// It is on its device's stream, or has ended.
  bool isEnqueued() const { return hasCome(Until::kEnqueued); }
  /// The failure of a call that has completed with one.
  std::optional<Failure> failure() const { return isCompleted() ? failure_ : std::nullopt; }
  /// When a call that has completed did so.
  std::chrono::steady_clock::time_point endedAt() const { return ended_at_; }
  /// Blocks until the call has ended (its own timeout bounds that); throws what it failed with. With a timeout above zero gives up
  /// waiting after it (returns false; the call goes on). Throws too what checkInterrupts() throws (the call goes on), and at once in a forked child.
  bool wait(std::chrono::milliseconds timeout = std::chrono::milliseconds(0));
  /// As wait(), whatever signals come.
  bool waitThrough(std::chrono::milliseconds timeout) { return waitFor(timeout, Until::kEnd, /*is_interruptible=*/false); }
  /// As wait(), but only until this rank's own messages are sent and received: the tensors are its caller's again, whatever the others still have to
  /// do.
  bool waitMoved(std::chrono::milliseconds timeout = std::chrono::milliseconds(0));
  /// As wait(), but only until the call is on its device's stream, which the caller's streams can then wait for.
  bool waitEnqueued(std::chrono::milliseconds timeout = std::chrono::milliseconds(0));
  /// Runs `callback` when the call ends: on the network's thread, or at once if it has ended.
  void onCompletion(std::function<void()> callback);
  /// Wakes who waits in waitMoved(); for the service, which does so at most once, before complete().
  void markMoved();
  /// Wakes who waits in waitEnqueued(); any thread.
  void markEnqueued();
  /// Ends the call, once; for the service, which holds it meanwhile.
  void complete(std::optional<Failure> failure);

 private:
  enum class Until : uint8_t { kEnqueued, kMoved, kEnd };
  bool waitFor(std::chrono::milliseconds timeout, Until until, bool is_interruptible = true);
  bool hasCome(Until until) const;
  void mark(std::atomic<bool>& flag);

  const CallKey key_;
  const bool is_detached_;
  const ForkMark fork_;
  std::mutex mutex_;  ///< guards the callbacks, and the completion against waiters that are about to sleep
  std::condition_variable ended_;
  std::vector<std::function<void()>> callbacks_;
  std::atomic<bool> is_enqueued_ = false;
  std::atomic<bool> is_moved_ = false;
  std::atomic<bool> is_completed_ = false;
  // Written before is_completed_, never after.
  std::optional<Failure> failure_;
  std::chrono::steady_clock::time_point ended_at_;
};

}  // namespace xmesh::runtime
