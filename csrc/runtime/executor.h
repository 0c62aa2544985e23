#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/agreement/start_terms.h"
#include "runtime/calls/peer_progress.h"
#include "runtime/failure.h"
#include "runtime/program/prepared_plan.h"

namespace xmesh::runtime {

/// Which executors move a call's bytes. Plain value.
struct Route {
  int16_t device_kind = 0;    ///< c10::DeviceType's number; 0: host memory
  int16_t device_index = 0;   ///< of this rank's device; may differ from rank to rank
  bool through_host = false;  ///< host memory carries them, and mirrors there stand for the tensors on the device
  auto operator<=>(const Route&) const = default;
};

/// How a call on a device is ordered against its caller's streams. Threading: the line's thread (see StreamExecutors); `stream` is as StreamKernels'.
class CallerStreams {
 public:
  virtual ~CallerStreams() = default;
  /// Makes the stream wait for what the caller had enqueued when it called.
  virtual void waitForCaller(void* stream) = 0;
  /// The call ends here on the stream: the caller's may wait for it.
  virtual void markEnd(void* stream) = 0;
};

/// Copies in host memory of a call's tensors on a device, where the call moves through host memory. Threading: asked on the network's thread.
class Mirrors {
 public:
  /// Given nullptr, or what the device failed with. Any thread.
  using Told = std::function<void(const std::string* error)>;
  virtual ~Mirrors() = default;
  /// Copies the sources to their mirrors, behind what the caller had enqueued when it called; tells once they are there.
  virtual void fetch(Told told) = 0;
  /// Copies the mirrors of the destinations to the device. Runs `enqueued` once the caller's streams may wait for that; tells once the device is
  /// done.
  virtual void store(std::function<void()> enqueued, Told told) = 0;
  /// The call is over: copies that have not begun do not begin. What is on its way keeps its memory.
  virtual void giveUp() noexcept = 0;
};

/// Tensors that move as a plan says.
struct Movement {
  std::shared_ptr<const PreparedPlan> prepared;
  std::vector<LocalTensor> src;  ///< one per tensor; empty entries where this rank is not in the mesh
  std::vector<LocalTensor> dst;
  std::shared_ptr<void> keep_alive;  ///< owns their memory; dropped on the network's thread
  Route route;
  std::shared_ptr<CallerStreams> caller;  ///< for a call on a device; null where no stream waits for it
  std::shared_ptr<Mirrors> mirrors;       ///< whose memory is in src and dst; null where there are none
  bool writes_once_agreed = false;        ///< what is in dst is the caller's: it stays as it is in a call that is refused
};

/// What a call has an executor do.
struct Execution {
  uint64_t call = 0;  ///< names what it moves: alike on every rank, never used again
  Movement movement;
  /// Runs once on the network's thread, when all is sent, received and copied; not after cancel(). May destroy the executor.
  std::function<void()> on_done;
  /// Runs at most once, on any thread: all is on the device's stream, and the caller's may wait for its end there. Never on the host.
  std::function<void()> on_enqueued;
  /// Runs instead of on_done, on the network's thread, where the device's stream was broken off; not after cancel(). `peer` is a group rank, or -1
  /// where none can be named.
  std::function<void(const std::string& reason, int32_t peer)> on_failed;
  /// Runs on the network's thread when calls that are agreed, the last of them on `turn`, wait for this one, which is not: a rank that has not made
  /// it can let it come behind them. See Executors::promise() and Executor::comesAfter().
  std::function<void(uint64_t turn)> on_held;
};

/// Runs one rank's program once. Threading: the network's thread.
class Executor {
 public:
  virtual ~Executor() = default;
  /// What this rank says; start() is given what was agreed.
  virtual StartTerms proposal() const { return {}; }
  /// Begins. May call on_done before it returns.
  virtual void start(const StartTerms& agreed) = 0;
  /// All participants have been found to make the same call. Once, after start().
  virtual void hasAgreed() {}
  /// What will be agreed is a turn after this one: somebody has promised to propose no less.
  virtual void comesAfter(uint64_t turn) { static_cast<void>(turn); }
  /// Gives up, because of this; no-op when done or not started. Where memory must outlive what is on its way, the executor keeps it.
  virtual void cancel(const Failure& why) = 0;
  /// Gives up after the network has been destroyed.
  virtual void abandon() = 0;
  /// One entry per peer of the program.
  virtual std::vector<PeerProgress> progress() const = 0;
};

/// When an executor may start.
enum class StartsWhen : uint8_t {
  kAtOnce,
  kIsSameCall,  ///< once the ranks know that they make the same call; those of a transfer do from the beginning
  kInTurn,      ///< once they have agreed on its turn, too: its bytes could meet those of another plan
};

/// Makes the executors of one group's rank on one data transport, and owns what they share. It outlives them. Threading: the network's thread;
/// peakStagingBytes() on any.
class Executors {
 public:
  virtual ~Executors() = default;
  virtual StartsWhen startsWhen() const = 0;
  /// Whether Executor::progress() is up to date; else messages may be done of which it does not know yet.
  virtual bool knowsProgress() const { return true; }
  /// Throws InvalidArgument when the tensors' shapes are not what the plan says.
  virtual std::unique_ptr<Executor> make(Execution execution) = 0;
  /// Executors that are made from now on propose turns after this one.
  virtual void promise(uint64_t turn) { static_cast<void>(turn); }
  /// The network is about to be destroyed: from when this returns other threads post nothing to it. Any thread.
  virtual void disconnect() {}
  /// The network has been destroyed: nothing more may be asked of it.
  virtual void abandon() = 0;
  /// Most staging memory that was in use at once.
  virtual int64_t peakStagingBytes() const = 0;
};

}  // namespace xmesh::runtime
