#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/calls/peer_progress.h"
#include "runtime/host/host_reductions.h"
#include "runtime/host/staging_use.h"
#include "runtime/memory/box_copy.h"
#include "runtime/program/program.h"
#include "transport/host_transport.h"

namespace xmesh::runtime {

/// Runs one rank's program once on a HostTransport: posts receives ahead, sends what is ready (straight from the tensors where a range is one
/// run in memory), passes on what arrives (before it is unpacked, and past late bytes of another slice: see trackOf), reduces contributions in
/// order, sends partial sums from their accumulators, copies what the rank keeps.
/// Threading: everything on the transport's thread, constructor excepted; never blocks, never spins.
/// Ownership: the tensors' memory, the transport and the pool must outlive the operation: until isDone() or cancel(). The destructor cancels;
/// after isDone() or cancel() it may run on any thread that is ordered after it.
class HostExecutor final : public transport::OperationEvents, private StagingClient {
 public:
  /// `call` names the transport's operations, one for each track of the program.
  /// `group_rank_of_peer[i]` is the transport's rank of program->peers()[i]. `src` and `dst` have one entry per tensor (empty entries where this rank
  /// is not in the mesh); throws InvalidArgument when their shapes are not what the plan says. `on_done` runs once on the transport's thread when all
  /// is sent, received and copied and the operation is closed; it may destroy the executor. It does not run after cancel().
  HostExecutor(std::shared_ptr<const Program> program, transport::HostTransport& transport, uint64_t call, std::vector<int32_t> group_rank_of_peer,
               std::vector<LocalTensor> src, std::vector<LocalTensor> dst, StagingPool& pool, std::function<void()> on_done);
  HostExecutor(const HostExecutor&) = delete;
  HostExecutor& operator=(const HostExecutor&) = delete;
  ~HostExecutor() override;

  /// Opens the operation and begins. May call on_done before it returns. Unless it `may_write`, no byte of the destinations changes and nothing is
  /// received before allowWrites(); what the rank has at hand is sent all the same.
  void start(bool may_write = true);
  /// Goes on where start() was not to write; no-op else. May call on_done before it returns.
  void allowWrites();
  /// Closes the operation and gives up: the tensors' memory is free when this returns. No-op when done or not started.
  void cancel();
  /// Gives up after the transport has been destroyed.
  void transportGone();

  bool isDone() const { return phase_ == Phase::kDone; }
  /// One entry per peer of the program.
  std::vector<PeerProgress> progress() const;

  void onSent(int64_t cookie) override;
  void onReceived(int64_t cookie) override;

 private:
  /// Packing, unpacking and copying give way to the transport after so many bytes.
  static constexpr int64_t kSliceBytes = int64_t{1} << 20;

  enum class Phase : uint8_t { kNew, kRunning, kDone, kCanceled };
  enum class EventKind : uint8_t { kStart, kMayWrite, kSent, kReceived, kStagingFree, kCopy, kPack, kUnpack };
  struct Event {
    EventKind kind = EventKind::kStart;
    int32_t index = 0;
  };
  /// What came in packed and is not yet where it belongs.
  struct PackedArrival {
    int32_t receive = 0;
    const std::byte* data = nullptr;
    int32_t send = -1;  ///< whose buffer holds it now, or -1: the receive's own
  };

  using PackedArrivals = std::map<std::pair<int32_t, int64_t>, PackedArrival>;  ///< by slice box and first element; they do not overlap

  void onStagingFree() override { handle({EventKind::kStagingFree, 0}); }
  /// Takes an event in, now or (when called back from inside) after the present one. The executor may be gone afterwards.
  void handle(Event event);
  void handleSoon(Event event);
  void dropTasks();
  void process(Event event);
  void settle();
  void begin();
  void beginToWrite();
  void postReceives();
  bool postReceive(int32_t index);
  std::byte* receiveTarget(int32_t index);
  transport::OperationId operationOf(int32_t track) const { return {call_, static_cast<uint32_t>(track)}; }
  void closeTracks();
  /// The first send not posted of a send's track, or -1.
  int32_t& nextSendLike(int32_t send) {
    const SendStep& step = program_->sends[static_cast<size_t>(send)];
    return next_send_[Program::trackIndex(step.peer, step.track)];
  }
  void postSendsLike(int32_t send);
  int32_t firstStagedSend();
  void postStagedSends();
  void postHeldUpSends();
  void postWaitingSends();
  StagingBuffer acquireSend(int32_t index, int64_t num_bytes);
  bool givesWay(int32_t index) const;
  void putOff(int32_t index);
  bool postSend(int32_t index);
  void pack(int32_t index, StagingBuffer& buffer);
  PackedArrivals::iterator packedArrivalOf(const SendStep& step);
  void unpackRangeOf(const SendStep& step);
  const std::byte* sendSource(const SendStep& step) const;
  void takeSent(int32_t index);
  void takeReceived(int32_t index);
  void passOn(int32_t index);
  int64_t unpack(PackedArrivals::iterator arrival);
  void unpackSoon();
  void unpackSlice();
  void unpackBeforeRelease(int32_t send);
  void onArrival(int32_t arrival);
  void copySlice();
  void releaseAll();
  const StridedBox& boxOf(int32_t box) const { return boxes_[static_cast<size_t>(box)]; }

  std::shared_ptr<const Program> program_;
  transport::HostTransport& transport_;
  const uint64_t call_;
  std::vector<int32_t> group_rank_of_peer_;
  StagingUse staging_;
  std::function<void()> on_done_;
  std::vector<StridedBox> boxes_;  ///< by slice box

  Phase phase_ = Phase::kNew;
  bool may_write_ = true;  ///< into the destinations
  bool is_handling_ = false;
  std::vector<Event> pending_;  ///< events that came while one was being handled
  int64_t num_open_ = 0;        ///< sends, receives and copies that are not complete

  std::vector<int32_t> num_deps_;      ///< by send: arrivals still missing
  std::vector<int32_t> next_send_;     ///< by track (Program::trackIndex): the first send not posted, or -1
  std::vector<int64_t> num_sent_;      ///< by peer
  std::vector<int64_t> num_received_;  ///< by peer
  std::vector<int32_t> staged_sends_;  ///< those that must be packed, ascending
  size_t next_staged_send_ = 0;        ///< those before are posted
  std::set<int32_t> held_up_sends_;    ///< ready, but without memory, or their turn to be packed, when they were tried last
  int64_t packed_bytes_ = 0;           ///< in the event being handled
  bool will_pack_ = false;             ///< a kPack event is posted
  int32_t next_receive_ = 0;
  std::vector<StagingBuffer> send_buffers_;     ///< by send; empty when nothing is packed
  std::vector<StagingBuffer> receive_buffers_;  ///< by receive; empty when nothing is staged
  PackedArrivals packed_arrivals_;
  bool will_unpack_ = false;  ///< a kUnpack event is posted
  HostReductions reductions_;
  size_t copy_index_ = 0;                ///< the copy under way
  int64_t copy_element_ = 0;             ///< its first element not copied
  std::shared_ptr<HostExecutor*> self_;  ///< what posted tasks hold: nulled when this ends
};

}  // namespace xmesh::runtime
