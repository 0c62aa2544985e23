#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace xmesh::runtime {

/// What staging memory is for. Each kind has a quarter of the bound as a budget of its own, so that none can starve another.
enum class StagingKind : uint8_t {
  kSend,        ///< packed bytes on their way out, in plan order; may be all there is of what was passed on and is not unpacked yet
  kSendAhead,   ///< packed bytes beyond that: of messages that overtake an earlier one, in another track, which cannot be sent yet
  kReceive,     ///< bytes that arrived and wait to be unpacked or accumulated
  kAccumulate,  ///< partial results of reductions
};
inline constexpr size_t kNumStagingKinds = 4;

/// A piece of staging memory; belongs to the pool that gave it. `capacity` counts against the budget of its kind.
struct StagingBuffer {
  std::byte* data = nullptr;
  int64_t capacity = 0;
  StagingKind kind = StagingKind::kSend;
  explicit operator bool() const { return data != nullptr; }
};

class StagingPool;

/// Somebody who uses a pool: one operation. Must call StagingPool::forget before it dies.
class StagingClient {
 public:
  virtual ~StagingClient() = default;
  /// The memory that this client last asked for in vain is free: it asks again, now or soon. Called by StagingPool::serve only.
  virtual void onStagingFree() = 0;

 private:
  friend class StagingPool;
  std::array<int32_t, kNumStagingKinds> num_held_{};
};

/// Bounded staging memory of one rank, shared by all operations in flight; reuses buffers. One thread only (the transport's), save for the
/// counters.
///
/// A request is granted when the kind's budget has room and no other client waits for that kind, or when the client holds nothing of the
/// kind: one message each is always granted, so a message larger than its budget still moves, and an operation's progress never
/// depends on another operation's. Hence memory in use stays below the bound plus one message per kind for every operation beyond the first
/// (and beyond the bound for a single one only if a message exceeds its budget). Waiting clients are served in the order of asking.
///
/// No deadlock: every rank acquires the memory of its sends in plan order (what overtakes has memory of another kind, and nothing depends on that),
/// likewise for its receives (an accumulator right before the first message it needs). Look at the earliest message of an operation's plan that is
/// not complete. Its sender's earlier sends are complete, so it holds no kSend memory for them, and later ones have not asked before it: the request
/// is granted. Its receiver's earlier receives are complete, so they are unpacked or accumulated and hold nothing. Both ends are posted (the receive
/// perhaps once the ranks have agreed, for which no memory is needed), hence it completes. The accumulator of a partial sum is held until the sum is
/// sent, which does not break this: all messages of one range's reduction, from the first contribution to the last sum, are neighbors in that order
/// on every rank (see Program). Whoever receives the earliest incomplete message holds accumulators only of reductions begun earlier; those of other
/// ranges have all their messages, the sums' sends too, before it, complete; and of its own range a rank has one. The sender of a sum has received
/// all that the sum is made of, since that comes earlier.
class StagingPool {
 public:
  /// `bound_bytes` > 0: the most bytes of all buffers together.
  explicit StagingPool(int64_t bound_bytes);
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;
  ~StagingPool();

  /// Memory for at least `num_bytes` > 0, aligned for every element type; or an empty buffer: then the client waits until onStagingFree().
  StagingBuffer acquire(StagingKind kind, int64_t num_bytes, StagingClient& client);
  /// The client waits no more for memory of this kind.
  void withdraw(StagingKind kind, const StagingClient& client);
  void release(const StagingBuffer& buffer, StagingClient& client);
  /// Tells waiting clients, in order, what has become free. Called by clients after they released memory, at the end of their own work.
  void serve();
  /// The client waits no more and holds nothing any more (it released all).
  void forget(StagingClient& client);
  /// Gives cached memory back to the system.
  void trim();

  /// In use by clients now. Any thread.
  int64_t bytesInUse() const { return bytes_in_use_.load(std::memory_order_relaxed); }
  /// The most bytes allocated at once since the pool was made, cached memory included. Any thread.
  int64_t peakBytes() const { return peak_bytes_.load(std::memory_order_relaxed); }

 private:
  struct Waiter {
    StagingClient* client = nullptr;
    int64_t num_bytes = 0;
    uint64_t ticket = 0;
  };
  struct Budget {
    int64_t bound_bytes = 0;
    int64_t bytes_in_use = 0;
    std::deque<Waiter> waiters;
  };
  Budget& budget(StagingKind kind) { return budgets_[static_cast<size_t>(kind)]; }
  StagingBuffer allocate(int64_t num_bytes);
  void freeCachedDownTo(int64_t num_bytes);

  int64_t bound_bytes_;
  std::array<Budget, kNumStagingKinds> budgets_;
  std::vector<StagingBuffer> cached_;
  int64_t bytes_cached_ = 0;
  uint64_t next_ticket_ = 1;
  bool is_serving_ = false;
  std::atomic<int64_t> bytes_in_use_{0};
  std::atomic<int64_t> peak_bytes_{0};
};

}  // namespace xmesh::runtime
