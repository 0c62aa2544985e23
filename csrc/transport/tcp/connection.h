#pragma once

#include <cstdint>
#include <string>

#include "transport/operation.h"

namespace xmesh::transport {

enum class Direction { kOutgoing, kIncoming };

/// Whom the two halves of a pair's traffic report to: TcpNetwork. Called on the loop's thread, and never from inside a call that queues something.
/// onGoodbye and onBroken may stop() the caller.
class ConnectionOwner {
 public:
  virtual ~ConnectionOwner() = default;
  virtual void onSendDone(OperationId operation, int64_t cookie) = 0;
  virtual void onReceiveDone(OperationId operation, int64_t cookie) = 0;
  virtual void onControlFrame(int32_t peer, std::string message) = 0;
  /// The peer has posted `count` receives in all for the operation's messages from here.
  virtual void onReadyFrame(int32_t peer, OperationId operation, int64_t count) = 0;
  /// This rank has taken `num_bytes` in all out of the peer's ring: none when it has just mapped it, kRingRefused when it cannot.
  virtual void onRingTaken(int32_t peer, int64_t num_bytes) = 0;
  /// The peer says the same of this rank's ring. False where that cannot be.
  virtual bool onRingTakenFrame(int32_t peer, int64_t num_bytes) = 0;
  /// `is_final` is false when the peer's last word is on its other connection.
  virtual void onGoodbyeFrame(int32_t peer, bool is_final) = 0;
  /// The connection that this rank opened (kOutgoing) or accepted is of no use any more; `reason` is for a person.
  virtual void onBroken(int32_t peer, Direction direction, const std::string& reason) = 0;
  /// One of the two ranks broke the protocol or the contract of HostTransport; the other end has been told if it was found here.
  virtual void onProtocolError(int32_t peer, const std::string& reason) = 0;
  /// Whether a peer that refuses connections may yet take one.
  virtual bool mayStillListen(int32_t peer) const = 0;
  /// Asks for a flush of the peer's sender at the end of the turn.
  virtual void wantFlush(int32_t peer) = 0;
};

}  // namespace xmesh::transport
