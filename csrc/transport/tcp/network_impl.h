#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/operation_table.h"
#include "transport/tcp/event_loop.h"
#include "transport/tcp/listener.h"
#include "transport/tcp/network.h"
#include "transport/tcp/receiver.h"
#include "transport/tcp/sender.h"

namespace xmesh::transport {

/// All state of a network; lives on the loop's thread but where noted.
class TcpNetwork::Impl final : public ConnectionOwner {
 public:
  Impl(TcpNetworkOptions options, PeerEvents& events);
  ~Impl() override;

  // Any thread.
  void post(std::function<void()> task) { loop_.post(std::move(task)); }
  bool drain(std::chrono::milliseconds timeout);

  // Loop thread.
  void open(OperationId operation, OperationEvents& events);
  void send(OperationId operation, int32_t peer, const void* data, int64_t num_bytes, int64_t cookie);
  void recv(OperationId operation, int32_t peer, void* data, int64_t num_bytes, int64_t cookie);
  void close(OperationId operation);
  void pace(int32_t peer, int64_t bytes_per_s);
  void sendControl(int32_t peer, const std::string& message);
  void setAddress(int32_t peer, const std::string& address);
  bool hasAddress(int32_t peer);
  void forget(int32_t peer);
  /// Throws std::logic_error on any other thread than the loop's.
  EventLoop& checkedLoop(const char* call);

  const TcpNetworkOptions options_;
  const pid_t pid_ = ::getpid();
  std::atomic<int64_t> num_rejected_{0};
  std::string address_;

 private:
  struct Peer {
    std::optional<SocketAddress> address;
    std::unique_ptr<TcpSender> sender;
    std::unique_ptr<TcpReceiver> receiver;
    int64_t pacing_rate = 0;
    bool is_lost = false;
    bool has_parted = false;  ///< said goodbye here, its final one is to come on its own connection
    bool wants_flush = false;
  };
  /// A callback that is due.
  struct Event {
    enum class Kind { kSent, kReceived, kControl, kLost, kGoodbye } kind = Kind::kSent;
    OperationId operation;
    int64_t cookie = 0;
    int32_t peer = 0;
    std::string text;
  };
  struct Drain {
    std::shared_ptr<std::promise<bool>> result;
    uint64_t timer = 0;
  };

  void onSendDone(OperationId operation, int64_t cookie) override { events_due_.push_back({Event::Kind::kSent, operation, cookie, 0, {}}); }
  void onReceiveDone(OperationId operation, int64_t cookie) override { events_due_.push_back({Event::Kind::kReceived, operation, cookie, 0, {}}); }
  void onControlFrame(int32_t peer, std::string message) override;
  void onReadyFrame(int32_t peer, OperationId operation, int64_t count) override;
  void onRingTaken(int32_t peer, int64_t num_bytes) override;
  bool onRingTakenFrame(int32_t peer, int64_t num_bytes) override;
  void onGoodbyeFrame(int32_t peer, bool is_final) override;
  void onBroken(int32_t peer, Direction direction, const std::string& reason) override;
  void onProtocolError(int32_t peer, const std::string& reason) override { losePeer(peer, Event::Kind::kLost, reason); }
  bool mayStillListen(int32_t peer) const override;
  void wantFlush(int32_t peer) override;

  Hello hello() const;
  /// Throws std::invalid_argument for this end's own number and for what is none.
  Peer& peerAt(int32_t peer);
  TcpSender& senderTo(int32_t rank);
  TcpReceiver& receiverFrom(int32_t rank);
  void startConnection(int32_t rank, const char* call);
  OperationTable::Open& openOperation(OperationId operation, const char* call);
  void onIncoming(int32_t rank, Fd fd);
  void onRejected(const std::string& reason);
  void log(const std::string& line);
  void losePeer(int32_t rank, Event::Kind kind, const std::string& reason);
  void dispatch(Event& event);
  void dispatchDue();
  bool turnEnd();
  bool flushPeers();
  void checkDrains();
  bool isDrained() const;
  void sayGoodbye();

  PeerEvents& peer_events_;
  EventLoop loop_;
  std::unique_ptr<TcpListener> listener_;
  std::unordered_map<int32_t, Peer> peers_;  ///< those that have been spoken of
  OperationTable operations_;
  std::deque<Event> events_due_;
  std::vector<int32_t> flush_due_;
  std::vector<Drain> drains_;
  bool is_closing_ = false;
};

}  // namespace xmesh::transport
