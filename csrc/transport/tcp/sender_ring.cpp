#include <algorithm>

#include "transport/tcp/sender.h"

namespace xmesh::transport {
namespace {

constexpr int64_t kMaxRingFrameBytes = 256 << 10;  ///< the peer copies one part out while this rank copies the next one in
constexpr int64_t kWorthARingBytes = 64 << 10;     ///< a connection gets its ring at the first message of this size

}  // namespace

void TcpSender::offerRing(int64_t message_bytes) {
  if (!may_share_memory_ || message_bytes < kWorthARingBytes) {
    return;
  }
  may_share_memory_ = false;
  ring_ = RingWriter::make();
  if (ring_) {
    const RingTicket ticket = ring_->ticket();
    appendFrame({FrameKind::kRing, ticket.nonce, ticket.pid, ticket.descriptor}, "", outbox_);
  }
}

bool TcpSender::onPeerTook(int64_t num_bytes) {
  if (state_ == State::kStopped) {
    return true;
  }
  if (num_bytes == kRingRefused && ring_ && !is_ring_mapped_) {
    ring_.reset();
    return true;
  }
  if (!ring_ || !ring_->onTaken(num_bytes)) {
    return false;
  }
  if (!is_ring_mapped_) {
    is_ring_mapped_ = true;
    ring_->onMapped();
  }
  return true;
}

/// Moves the next part of the message whose turn it is, as much as the ring takes; its header follows in the outbox. Small messages go whole, with
/// their headers.
int64_t TcpSender::copyToRing() {
  if (!is_ring_mapped_ || runnable_.empty() || ring_->freeBytes() == 0) {
    return 0;
  }
  const OperationId operation = runnable_.front();
  Stream& stream = streams_.at(operation);
  Message& message = stream.messages.front();
  if (message.num_bytes <= kSmallMessageBytes) {
    return 0;
  }
  const int64_t num_bytes = std::min({message.num_bytes - message.offset, ring_->freeBytes(), kMaxRingFrameBytes});
  ring_->write(message.data + message.offset, num_bytes);
  appendFrame({FrameKind::kRingData, operation, num_bytes, message.num_bytes}, "", outbox_);
  message.offset += num_bytes;
  takeQuantum(num_bytes);
  if (message.offset == message.num_bytes) {
    finishMessage(operation, stream);
  } else {
    makeRunnable(operation);
  }
  return num_bytes;
}

}  // namespace xmesh::transport
