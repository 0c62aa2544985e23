#pragma once

#include <cstdint>
#include <deque>
#include <memory>
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

/// The connection that a peer has opened to this rank, and the receives posted for it. Loop thread only. Payload is read straight into the posted
/// buffers.
class TcpReceiver final : private FdHandler {
 public:
  TcpReceiver(EventLoop& loop, ConnectionOwner& owner, int32_t peer, int32_t own_rank, bool may_share_memory);
  ~TcpReceiver() override;
  TcpReceiver(const TcpReceiver&) = delete;
  TcpReceiver& operator=(const TcpReceiver&) = delete;

  /// Takes the connection after its hello.
  void attach(Fd fd);
  bool isAttached() const { return fd_.valid(); }
  /// Returns how many receives the operation has posted here in all. The buffer is written until the receive is done or forgotten.
  int64_t post(OperationId operation, void* data, int64_t num_bytes, int64_t cookie);
  /// Drops the operation's receives; what still arrives for it is discarded.
  void forget(OperationId operation);
  /// Writes a frame to the peer against the connection's direction, if it can be done at once.
  void sayBack(std::string_view frame);
  void stop();

 private:
  enum class Phase { kHeader, kText, kPayload, kStatus };
  struct Receive {
    char* data = nullptr;
    int64_t num_bytes = 0;
    int64_t received_bytes = 0;
    int64_t cookie = 0;
  };
  struct Stream {
    std::deque<Receive> receives;
    int64_t num_posted = 0;
    int64_t num_done = 0;
  };

  void onEvents(uint32_t events) override;
  /// One system call; false when the connection has nothing more for now or is gone.
  bool readOnce();
  void consume();
  bool consumeHeader();
  bool consumeText();
  bool consumePayload();
  bool consumeStatus();
  void startData();
  void openRing();
  void readFromRing();
  /// Where the payload of the frame at hand belongs; null when it is discarded or was refused.
  char* whereToRead();
  void finishData();
  /// Gives the connection up and tells both ends why.
  void refuse(const std::string& reason);
  std::string describeMessage(const Stream& stream) const;
  size_t numStaged() const { return staged_end_ - staged_begin_; }

  EventLoop& loop_;
  ConnectionOwner& owner_;
  const int32_t peer_;
  const int32_t own_rank_;
  const bool may_share_memory_;
  Fd fd_;
  uint64_t registration_ = 0;
  int64_t budget_ = 0;               ///< bytes that this turn may still move
  std::unique_ptr<char[]> staging_;  ///< bytes read ahead of the frame they belong to
  size_t staged_begin_ = 0;
  size_t staged_end_ = 0;
  Phase phase_ = Phase::kHeader;
  FrameHeader header_;
  int64_t left_bytes_ = 0;       ///< what is still to come of the text or payload
  char* destination_ = nullptr;  ///< where the payload goes; null when it is discarded
  std::optional<RingReader> ring_;
  std::string text_;
  std::unordered_map<OperationId, Stream> streams_;
};

}  // namespace xmesh::transport
