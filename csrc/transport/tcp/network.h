#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "transport/peer_network.h"
#include "transport/tcp/frame.h"

namespace xmesh::transport {

struct TcpNetworkOptions {
  /// This end's number. The others are any numbers from 0 on, which who is connected knows them by: those of a group's ranks, say. They may come
  /// and go; a number is never used by two.
  int32_t own_peer = 0;
  /// How many peers may connect at once: of more connections, and a few, that have not said who they are the oldest are dropped.
  int32_t most_peers = 4096;
  /// Address of the interface to listen on and to be reached at.
  std::string listen_host = "127.0.0.1";
  /// The secret of those who may connect; connections without it are dropped.
  Token token{};
  /// Whether payload goes to and comes from peers at this rank's own address through memory shared with them, where both wish so and the kernel
  /// allows it. What goes there is not paced.
  bool shared_memory = true;
  /// How long a peer may not answer before it counts as lost.
  std::chrono::milliseconds connect_timeout{30'000};
  /// How long a peer may refuse: it listens before anybody is told where.
  std::chrono::milliseconds refused_timeout{1'000};
  /// How long an incoming connection may take to say who it is.
  std::chrono::milliseconds handshake_timeout{10'000};
  /// Gets lines about connections that were dropped (the first of each network only) and about callbacks that threw; null writes to stderr.
  std::function<void(const std::string&)> log;
};

/// PeerNetwork over TCP. One thread per network, which sleeps in epoll. Each rank opens a connection of its own to a peer at the first message to
/// it and writes all its messages there, so a pair has up to two connections, each used in one direction. A message leaves in frames of at most
/// kMaxFramePayloadBytes; reshards of which receives are posted go one after another, each a TcpSender::kQuantumBytes at a time, the tracks of one go
/// by ascending cookie; control frames go between. Payload is not copied, but for ranks at one address, between which it goes through a ring in
/// shared memory, and its connection only says what is there and what has been taken.
///
/// Failures: a peer whose connection ends without goodbye, or that cannot be reached within connect_timeout, is lost, as is a peer whose message has
/// another size than its receive (both ends are told). A lack of resources of this process is named as such in the reason. A peer that is merely
/// silent is never lost. After its loss a peer's messages are ignored and nothing is sent to it.
///
/// Threading: construct, destroy, post(), drain() and the const methods without a peer argument on any thread but the network's; the rest on the
/// network's thread (std::logic_error elsewhere). Callbacks come on the network's thread and never from inside a call of this class. The object must
/// not be used in a forked child; destroying it there does nothing.
class TcpNetwork final : public PeerNetwork {
 public:
  /// Listens when this returns. `events` must outlive the network. Throws std::invalid_argument for an address that is none, std::system_error when
  /// it cannot listen.
  TcpNetwork(TcpNetworkOptions options, PeerEvents& events);
  /// Says goodbye to its peers: operations still open are dropped, and half-sent frames ended, within about a second; waits for no peer longer.
  ~TcpNetwork() override;
  TcpNetwork(const TcpNetwork&) = delete;
  TcpNetwork& operator=(const TcpNetwork&) = delete;

  /// Where peers reach this rank: "host:port".
  std::string address() const;
  /// Waits until everything is written that the peers' posted receives do not hold back; false when `timeout` comes first.
  bool drain(std::chrono::milliseconds timeout);
  /// Connections dropped because they did not know the secret, or were no peers.
  int64_t numRejectedConnections() const;

  void post(std::function<void()> task) override;
  void open(OperationId operation, OperationEvents& events) override;
  void send(OperationId operation, int32_t peer, const void* data, int64_t num_bytes, int64_t cookie) override;
  void recv(OperationId operation, int32_t peer, void* data, int64_t num_bytes, int64_t cookie) override;
  void close(OperationId operation) override;
  void pace(int32_t peer, int64_t bytes_per_s) override;
  void sendControl(int32_t peer, std::string message) override;
  uint64_t startTimer(std::chrono::milliseconds delay, std::function<void()> task) override;
  void cancelTimer(uint64_t timer) override;
  void setAddress(int32_t peer, std::string address) override;
  void forget(int32_t peer) override;
  bool hasAddress(int32_t peer) const override;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace xmesh::transport
