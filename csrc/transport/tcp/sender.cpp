#include "transport/tcp/sender.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <utility>

namespace xmesh::transport {
namespace {

constexpr size_t kMaxCopiedBytes = 64 << 10;
constexpr int64_t kFlushBudgetBytes = 4 << 20;
constexpr size_t kKeptOutboxBytes = 256 << 10;
constexpr std::array<char, 64 << 10> kFiller{};

}  // namespace

struct TcpSender::IoVectors {
  std::array<iovec, 4> items{};
  size_t count = 0;
  void add(const char* data, int64_t num_bytes) {
    if (num_bytes > 0) {
      items[count++] = {const_cast<char*>(data), static_cast<size_t>(num_bytes)};
    }
  }
};

TcpSender::TcpSender(EventLoop& loop, ConnectionOwner& owner, int32_t peer, const Hello& hello, bool may_share_memory)
    : loop_(loop), owner_(owner), peer_(peer), may_share_memory_(may_share_memory) {
  std::array<char, kHelloBytes> bytes{};
  encodeHello(hello, bytes);
  outbox_.assign(bytes.data(), bytes.size());
}

TcpSender::~TcpSender() { stop(); }

void TcpSender::stop() {
  state_ = State::kStopped;
  closeSocket();
  loop_.cancelTimer(std::exchange(timer_, 0));
  outbox_ = {};
  outbox_sent_ = 0;
  ready_.clear();
  ring_taken_.reset();
  ring_.reset();
  is_ring_mapped_ = false;
  streams_.clear();
  runnable_.clear();
  frame_.reset();
}

void TcpSender::closeSocket() {
  loop_.remove(std::exchange(registration_, 0));
  fd_.reset();
}

void TcpSender::onEvents(uint32_t events) {
  try {
    handle(events);
  } catch (const std::exception& error) {
    owner_.onBroken(peer_, Direction::kOutgoing, "cannot talk to rank " + std::to_string(peer_) + ": this rank failed (" + error.what() + ")");
  }
}

void TcpSender::handle(uint32_t events) {
  if (state_ == State::kConnecting) {
    const int error = pendingError(fd_.get());
    if (error != 0) {
      onConnectFailed(error);
    } else if ((events & EPOLLOUT) != 0) {
      isConnectedToItself(fd_.get()) ? onConnectFailed(ECONNREFUSED) : onConnected();
    }
    return;
  }
  if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) {
    readReverse();
  }
  if (state_ == State::kConnected && (events & EPOLLOUT) != 0) {
    owner_.wantFlush(peer_);
  }
}

void TcpSender::readReverse() {
  std::array<char, 4096> bytes;
  while (state_ == State::kConnected) {
    const ssize_t count = ::recv(fd_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (count > 0) {
      reverse_.append(bytes.data(), static_cast<size_t>(count));
      if (!parseReverse()) {
        return;
      }
    } else if (count == 0) {
      breakDown("", ECONNRESET);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return;
    } else if (errno != EINTR) {
      breakDown("cannot read from", errno);
    }
  }
}

bool TcpSender::parseReverse() {
  while (reverse_.size() >= kFrameHeaderBytes) {
    const auto header = decodeFrameHeader(std::span<const char, kFrameHeaderBytes>(reverse_.data(), kFrameHeaderBytes));
    const bool is_error = header && header->kind == FrameKind::kError;
    if (!is_error && !(header && header->kind == FrameKind::kGoodbye)) {
      owner_.onBroken(peer_, Direction::kOutgoing,
                      "protocol error: rank " + std::to_string(peer_) + " wrote something unexpected on its incoming connection");
      return false;
    }
    const size_t text_bytes = is_error ? static_cast<size_t>(header->num_bytes) : 0;
    if (reverse_.size() < kFrameHeaderBytes + text_bytes) {
      return true;
    }
    const std::string text = reverse_.substr(kFrameHeaderBytes, text_bytes);
    reverse_.erase(0, kFrameHeaderBytes + text_bytes);
    is_error ? owner_.onProtocolError(peer_, text) : owner_.onGoodbyeFrame(peer_, header->num_bytes == kGoodbyeFinal);
    if (state_ != State::kConnected) {
      return false;
    }
  }
  return true;
}

void TcpSender::breakDown(const std::string& what, int error) {
  const std::string peer = "rank " + std::to_string(peer_) + " at " + address_.str();
  if (isLocalShortage(error)) {
    owner_.onBroken(peer_, Direction::kOutgoing, what + " " + peer + ": this rank is short of resources (" + errnoText(error) + ")");
  } else if (error == ECONNRESET || error == EPIPE) {
    owner_.onBroken(peer_, Direction::kOutgoing, "connection reset by peer: " + peer + " ended without goodbye");
  } else {
    owner_.onBroken(peer_, Direction::kOutgoing, what + " " + peer + ": " + errnoText(error));
  }
}

void TcpSender::queueControl(std::string_view message) {
  appendFrame({FrameKind::kControl, 0, static_cast<int64_t>(message.size()), 0}, message, outbox_);
}

void TcpSender::queueGoodbye() {
  ring_taken_.reset();  // nothing follows
  appendFrame({FrameKind::kGoodbye, 0, kGoodbyeFinal, 0}, "", outbox_);
}

void TcpSender::queueReady(OperationId operation, int64_t count) { ready_[operation] = count; }

void TcpSender::queueRingTaken(int64_t num_bytes) { ring_taken_ = num_bytes; }

void TcpSender::queueData(OperationId operation, const void* data, int64_t num_bytes, int64_t cookie) {
  Stream& stream = streams_[operation];
  stream.messages.push_back({static_cast<const char*>(data), num_bytes, 0, cookie});
  schedule(operation, stream);
}

void TcpSender::grant(OperationId operation, int64_t count) {
  Stream& stream = streams_[operation];
  stream.num_granted = std::max(stream.num_granted, count);
  schedule(operation, stream);
}

void TcpSender::forget(OperationId operation) {
  const auto found = streams_.find(operation);
  ready_.erase(operation);
  if (found == streams_.end()) {
    return;
  }
  if (found->second.is_scheduled) {
    std::erase(runnable_, operation);
  }
  streams_.erase(found);
  if (frame_ && !frame_->is_aborted && frame_->operation == operation) {
    if (frame_->sent_bytes == 0) {
      frame_.reset();
    } else {
      frame_->is_aborted = true;
      frame_->payload = nullptr;
      frame_->status = static_cast<char>(FrameStatus::kAborted);
    }
  }
}

void TcpSender::pace(int64_t bytes_per_s) {
  pacing_rate_ = bytes_per_s;
  if (fd_.valid()) {
    setPacingRate(fd_.get(), bytes_per_s);
  }
}

bool TcpSender::hasQueued() const {
  const bool may_write = state_ == State::kConnecting || state_ == State::kConnected;
  return may_write && (outbox_sent_ < outbox_.size() || frame_ || !runnable_.empty() || !ready_.empty() || ring_taken_);
}

bool TcpSender::flush() {
  int64_t budget = kFlushBudgetBytes;
  while (state_ == State::kConnected) {
    encodeNotices();
    copySmallMessages();
    if (!frame_) {
      budget -= copyToRing();
      startFrame();
    }
    if (!frame_ && outbox_sent_ == outbox_.size()) {
      return false;
    }
    if (budget <= 0) {
      return true;
    }
    const int64_t written = writeOnce();
    if (written > 0) {
      budget -= written;
      account(written);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return false;
    } else if (errno != EINTR) {
      const int error = errno;
      readReverse();  // the peer may have said why
      if (state_ == State::kConnected) {
        breakDown("cannot send to", error);
      }
      return false;
    }
  }
  return false;
}

void TcpSender::encodeNotices() {
  for (const auto& [operation, count] : ready_) {
    appendFrame({FrameKind::kReady, operation, count, 0}, "", outbox_);
  }
  ready_.clear();
  if (ring_taken_) {
    appendFrame({FrameKind::kRingTaken, 0, *ring_taken_, 0}, "", outbox_);
    ring_taken_.reset();
  }
}

void TcpSender::copySmallMessages() {
  while (!runnable_.empty() && outbox_.size() - outbox_sent_ < kMaxCopiedBytes) {
    const OperationId operation = runnable_.front();
    Stream& stream = streams_.at(operation);
    const Message& message = stream.messages.front();
    if (message.num_bytes > kSmallMessageBytes) {
      return;
    }
    const std::string_view payload(message.data, static_cast<size_t>(message.num_bytes));
    appendFrame({FrameKind::kData, operation, message.num_bytes, message.num_bytes}, payload, outbox_);
    outbox_.push_back(static_cast<char>(FrameStatus::kOk));
    takeQuantum(message.num_bytes);
    finishMessage(operation, stream);
  }
}

void TcpSender::startFrame() {
  if (runnable_.empty()) {
    return;
  }
  const OperationId operation = runnable_.front();
  const Message& message = streams_.at(operation).messages.front();
  if (is_ring_mapped_ || message.num_bytes <= kSmallMessageBytes) {
    return;  // small ones go through the outbox, others through the ring: it is full now
  }
  offerRing(message.num_bytes);
  takeQuantum(std::min(message.num_bytes - message.offset, kMaxFramePayloadBytes));
  frame_ = Frame{};
  Frame& frame = *frame_;
  frame.operation = operation;
  frame.payload = message.data + message.offset;
  frame.payload_bytes = std::min(message.num_bytes - message.offset, kMaxFramePayloadBytes);
  encodeFrameHeader({FrameKind::kData, operation, frame.payload_bytes, message.num_bytes}, frame.header);
}

void TcpSender::finishFrame() {
  const Frame frame = *frame_;
  frame_.reset();
  if (frame.is_aborted) {
    return;
  }
  Stream& stream = streams_.at(frame.operation);
  Message& message = stream.messages.front();
  message.offset += frame.payload_bytes;
  if (message.offset == message.num_bytes) {
    finishMessage(frame.operation, stream);
  } else {
    makeRunnable(frame.operation);
  }
}

void TcpSender::finishMessage(OperationId operation, Stream& stream) {
  owner_.onSendDone(operation, stream.messages.front().cookie);
  stream.messages.pop_front();
  ++stream.num_sent;
  stream.is_scheduled = false;
  schedule(operation, stream);
}

void TcpSender::addOutbox(IoVectors& vectors) const {
  vectors.add(outbox_.data() + outbox_sent_, static_cast<int64_t>(outbox_.size() - outbox_sent_));
}

void TcpSender::addFrame(IoVectors& vectors) const {
  constexpr auto kHeader = static_cast<int64_t>(kFrameHeaderBytes);
  const int64_t sent = frame_->sent_bytes;
  if (sent < kHeader) {
    vectors.add(frame_->header.data() + sent, kHeader - sent);
  }
  const int64_t payload_sent = std::max<int64_t>(0, sent - kHeader);
  const int64_t payload_left = frame_->payload_bytes - payload_sent;
  if (frame_->is_aborted) {
    const int64_t filler = std::min<int64_t>(payload_left, static_cast<int64_t>(kFiller.size()));
    vectors.add(kFiller.data(), filler);
    if (filler < payload_left) {
      return;
    }
  } else {
    vectors.add(frame_->payload + payload_sent, payload_left);
  }
  vectors.add(&frame_->status, 1);
}

int64_t TcpSender::writeOnce() {
  IoVectors vectors;
  const bool frame_has_begun = frame_ && frame_->sent_bytes > 0;
  if (frame_has_begun) {
    addFrame(vectors);
  } else {
    addOutbox(vectors);
    if (frame_) {
      addFrame(vectors);
    }
  }
  msghdr message{};
  message.msg_iov = vectors.items.data();
  message.msg_iovlen = vectors.count;
  return ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void TcpSender::account(int64_t written) {
  const bool frame_has_begun = frame_ && frame_->sent_bytes > 0;
  if (!frame_has_begun) {
    const auto from_outbox = std::min(written, static_cast<int64_t>(outbox_.size() - outbox_sent_));
    outbox_sent_ += static_cast<size_t>(from_outbox);
    written -= from_outbox;
    if (outbox_sent_ == outbox_.size()) {
      outbox_.clear();
      outbox_sent_ = 0;
      if (outbox_.capacity() > kKeptOutboxBytes) {
        outbox_.shrink_to_fit();
      }
    }
  }
  if (frame_) {
    frame_->sent_bytes += written;
    if (frame_->sent_bytes == frame_->totalBytes()) {
      finishFrame();
    }
  }
}

}  // namespace xmesh::transport
