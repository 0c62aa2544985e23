#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

namespace xmesh::transport {

/// What ended a stream before its time.
struct StreamFailure {
  std::string reason;  ///< for a person
  int32_t peer = -1;   ///< whom it was about; -1 where none can be named
};

/// A transport whose messages are enqueued on one in-order stream and complete there; the host is told nothing. One object is one rank's end of one
/// communicator. Buffers must live until the stream has passed the operation that uses them.
/// Threading: one thread at a time. Nothing blocks the host for a peer.
/// Matching: the k-th send to a peer meets the peer's k-th recv from this rank on the same communicator; their sizes must be equal.
/// Order: an entry of the stream (a group, a message outside groups, a launch) begins when the one before it has ended. A message ends only when
/// its counterpart has begun (rendezvous), so the ranks' orders must agree.
/// Groups: NCCL runs a group in passes, in which the k-th messages of all ways come k-th. A pass is a row of rounds; both ends have a way's message
/// in the same round. Rounds run in batches of eight, of which NCCL alone knows which ones share one. So messages of one group may wait for each
/// other if two of them go the same way, or if in a communicator of more than eight ranks another rank has them in different groups.
///
/// Connections: the first message of a way needs one. NCCL makes it when the group is enqueued, for all new ways of the group at once, and waits on
/// the host until their peers do the same. Groups whose messages would not wait for each other may do so there, hence connectWays() comes first.
class StreamTransport {
 public:
  virtual ~StreamTransport() = default;
  /// Connects the ways to and from these peers that are not connected yet: one entry of the stream, nothing where there are none. The peers do so
  /// too, and all ranks in one order. Not inside a group.
  virtual void connectWays(std::span<const int32_t> send_to, std::span<const int32_t> receive_from) = 0;
  /// Messages enqueued up to groupEnd() make one entry of the stream. Groups do not nest.
  virtual void groupBegin() = 0;
  virtual void groupEnd() = 0;
  virtual void enqueueSend(int32_t peer, const void* data, int64_t num_bytes) = 0;
  virtual void enqueueRecv(int32_t peer, void* data, int64_t num_bytes) = 0;
  /// One entry of the stream: the memory of `root` comes into that of all other ranks of the communicator, who call with as many bytes. Their k-th
  /// broadcasts are one. It may end before those of others do, but not before it has its bytes. Not inside a group.
  virtual void enqueueBroadcast(int32_t root, void* data, int64_t num_bytes) = 0;
  /// Puts work of this rank on the stream: `launch(stream)` must only do work, or start work on the native stream handle, that belongs behind all
  /// entries so far and before all later ones. It runs on the host at once (a device stream) or when the stream gets there (a host-run fake,
  /// which passes nullptr). Not inside a group.
  virtual void enqueue(std::function<void(void* stream)> launch) = 0;
  /// Runs `told(nullptr)` on the host, on any thread, once the stream has passed everything that was enqueued before; or with the failure that ended
  /// it. Then buffers are free. Not inside a group.
  virtual void whenReached(std::function<void(const StreamFailure* failure)> told) = 0;
  /// Gives up what is enqueued and not passed; what is enqueued from now on does nothing. The others' ends wait for ever until they abort too. Any
  /// thread, while another one enqueues or waits; again is no-op.
  virtual void abort(const StreamFailure& failure) noexcept = 0;
};

}  // namespace xmesh::transport
