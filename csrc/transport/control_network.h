#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

namespace xmesh::transport {

/// What a ControlNetwork tells its owner. Called on the network's thread.
class PeerEvents {
 public:
  virtual ~PeerEvents() = default;
  /// A control message, in the order its sender sent it.
  virtual void onControl(int32_t peer, std::string message) = 0;
  /// The peer's process ended, its connection broke, or it cannot be reached; `reason` is for a person. Told once per peer. Operations that
  /// involve the peer will not complete; closing them is the owner's business. A peer that said goodbye (orderly shutdown) with nothing
  /// left to say is told here too, with is_goodbye.
  virtual void onPeerLost(int32_t peer, const std::string& reason, bool is_goodbye) = 0;
};

/// Carries small messages between peers, knows when a peer is gone, and keeps time. It is there whatever moves the tensors' bytes.
/// Threading: everything but post() is called on the network's own thread, as are the PeerEvents.
class ControlNetwork {
 public:
  virtual ~ControlNetwork() = default;
  /// Runs `task` on the network's thread, after the tasks posted before. Any thread.
  virtual void post(std::function<void()> task) = 0;
  /// Queues a control message; connects first if need be. Control messages overtake queued data of other messages, not each other.
  virtual void sendControl(int32_t peer, std::string message) = 0;
  /// Runs `task` on the network's thread after `delay`. Returns an id for cancelTimer.
  virtual uint64_t startTimer(std::chrono::milliseconds delay, std::function<void()> task) = 0;
  virtual void cancelTimer(uint64_t timer) = 0;
  /// Tells where a peer listens ("host:port"); needed once before the first message to it.
  virtual void setAddress(int32_t peer, std::string address) = 0;
  virtual bool hasAddress(int32_t peer) const = 0;
  /// The peer has been told as lost, and will not be spoken of again: frees what is kept of it. What it still sends is dropped.
  virtual void forget(int32_t peer) { static_cast<void>(peer); }
};

}  // namespace xmesh::transport
