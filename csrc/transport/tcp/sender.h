#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "transport/host_transport.h"
#include "transport/socket.h"
#include "transport/tcp/connection.h"
#include "transport/tcp/event_loop.h"
#include "transport/tcp/frame.h"
#include "transport/tcp/shared_ring.h"

namespace xmesh::transport {

/// The connection that this rank opens to a peer and writes to. Loop thread only. Queued payload is written from the caller's buffer, but for small
/// messages, which are copied so that many leave with one system call, and between ranks at one address, where it goes through a ring in shared
/// memory once the peer has mapped that; a pace does not hold there.
class TcpSender final : private FdHandler {
 public:
  /// Up to here a copy is cheaper than a system call of its own.
  static constexpr int64_t kSmallMessageBytes = 8 << 10;
  /// The quantum: what of one call leaves before another call goes. Calls that share a connection by halves would both end late: of a pipeline's
  /// values to one stage the first is needed first. A call with more than that holds up no other for longer.
  static constexpr int64_t kQuantumBytes = 32 << 20;

  TcpSender(EventLoop& loop, ConnectionOwner& owner, int32_t peer, const Hello& hello, bool may_share_memory);
  ~TcpSender() override;
  TcpSender(const TcpSender&) = delete;
  TcpSender& operator=(const TcpSender&) = delete;

  /// Begins to connect unless that has been done; tries again for `timeout` while the peer refuses.
  void connect(const SocketAddress& address, std::chrono::milliseconds timeout, std::chrono::milliseconds refused_timeout);
  void queueControl(std::string_view message);
  void queueGoodbye();
  /// Tells the peer, once per flush, how many receives are posted.
  void queueReady(OperationId operation, int64_t count);
  /// Tells the peer, once per flush, how much has been taken out of its ring.
  void queueRingTaken(int64_t num_bytes);
  void queueData(OperationId operation, const void* data, int64_t num_bytes, int64_t cookie);
  /// Lets the first `count` messages of the operation go.
  void grant(OperationId operation, int64_t count);
  /// The peer has taken `num_bytes` in all out of the ring, or kRingRefused. False where that cannot be.
  bool onPeerTook(int64_t num_bytes);
  /// Drops the operation's messages; a frame that is half written is completed with filler and marked aborted.
  void forget(OperationId operation);
  /// Bytes per second; 0 lifts the limit.
  void pace(int64_t bytes_per_s);
  /// Writes until the socket is full or nothing is left that may go. True when it stopped only to give others their turn.
  bool flush();
  /// Reads what the peer has said on this connection: a goodbye or an error.
  void readReverse();
  /// Closes the connection and drops everything; nothing is reported any more.
  void stop();

  /// Whether the peer is to hear a goodbye on this connection: it is there, or it is being made and control messages wait for it.
  bool owesGoodbye() const { return state_ == State::kConnected || (state_ == State::kConnecting && outbox_.size() > kHelloBytes); }
  /// Whether something waits that the peer's receives do not hold back.
  bool hasQueued() const;

 private:
  enum class State { kIdle, kConnecting, kConnected, kStopped };
  struct Message {
    const char* data = nullptr;
    int64_t num_bytes = 0;
    int64_t offset = 0;
    int64_t cookie = 0;
  };
  struct Stream {
    std::deque<Message> messages;
    int64_t num_granted = 0;
    int64_t num_sent = 0;
    bool is_scheduled = false;  ///< in runnable_, or its frame is being written
  };
  /// The kData frame that is being written.
  struct Frame {
    OperationId operation;
    std::array<char, kFrameHeaderBytes> header{};
    const char* payload = nullptr;  ///< filler once aborted
    int64_t payload_bytes = 0;
    int64_t sent_bytes = 0;
    char status = static_cast<char>(FrameStatus::kOk);
    bool is_aborted = false;
    int64_t totalBytes() const { return static_cast<int64_t>(kFrameHeaderBytes) + payload_bytes + 1; }
  };
  struct IoVectors;

  void onEvents(uint32_t events) override;
  void handle(uint32_t events);
  void tryConnect();
  void onConnected();
  void onConnectFailed(int error);
  void onConnectTimeout();
  void closeSocket();
  bool parseReverse();
  void breakDown(const std::string& what, int error);

  void schedule(OperationId operation, Stream& stream);
  void makeRunnable(OperationId operation);
  void takeQuantum(int64_t num_bytes);
  bool mayGo(const Stream& stream) const { return !stream.messages.empty() && stream.num_sent < stream.num_granted; }
  void encodeNotices();
  void copySmallMessages();
  void offerRing(int64_t message_bytes);
  int64_t copyToRing();
  void startFrame();
  void finishFrame();
  void finishMessage(OperationId operation, Stream& stream);
  void addOutbox(IoVectors& vectors) const;
  void addFrame(IoVectors& vectors) const;
  int64_t writeOnce();
  void account(int64_t written);

  EventLoop& loop_;
  ConnectionOwner& owner_;
  const int32_t peer_;
  State state_ = State::kIdle;
  Fd fd_;
  uint64_t registration_ = 0;
  uint64_t timer_ = 0;
  SocketAddress address_;
  std::chrono::milliseconds connect_timeout_{};
  std::chrono::milliseconds refused_timeout_{};
  EventLoop::Clock::time_point connect_deadline_;
  std::chrono::milliseconds backoff_{};
  int connect_error_ = 0;
  int64_t pacing_rate_ = 0;
  std::string reverse_;

  bool may_share_memory_ = false;
  std::optional<RingWriter> ring_;
  bool is_ring_mapped_ = false;

  std::string outbox_;  ///< encoded frames
  size_t outbox_sent_ = 0;
  std::map<OperationId, int64_t> ready_;
  std::optional<int64_t> ring_taken_;  ///< to be told
  std::unordered_map<OperationId, Stream> streams_;
  std::deque<OperationId> runnable_;  ///< among the tracks of one call the lowest cookie first
  uint64_t quantum_call_ = 0;         ///< the call that goes
  int64_t quantum_bytes_ = 0;         ///< what it has left of its quantum
  std::optional<Frame> frame_;
};

}  // namespace xmesh::transport
