#include "transport/tcp/receiver.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <utility>

namespace xmesh::transport {
namespace {

constexpr size_t kStagingBytes = 16 << 10;
constexpr int64_t kReadBudgetBytes = 4 << 20;

}  // namespace

TcpReceiver::TcpReceiver(EventLoop& loop, ConnectionOwner& owner, int32_t peer, int32_t own_rank, bool may_share_memory)
    : loop_(loop), owner_(owner), peer_(peer), own_rank_(own_rank), may_share_memory_(may_share_memory) {}

TcpReceiver::~TcpReceiver() { stop(); }

void TcpReceiver::stop() {
  loop_.remove(std::exchange(registration_, 0));
  fd_.reset();
  streams_.clear();
  destination_ = nullptr;
  ring_.reset();
}

void TcpReceiver::attach(Fd fd) {
  fd_ = std::move(fd);
  setNoDelay(fd_.get());
  staging_ = std::make_unique<char[]>(kStagingBytes);
  registration_ = loop_.add(fd_.get(), EPOLLIN, *this);
}

int64_t TcpReceiver::post(OperationId operation, void* data, int64_t num_bytes, int64_t cookie) {
  Stream& stream = streams_[operation];
  stream.receives.push_back({static_cast<char*>(data), num_bytes, 0, cookie});
  return ++stream.num_posted;
}

void TcpReceiver::forget(OperationId operation) {
  streams_.erase(operation);
  if (header_.kind == FrameKind::kData && header_.operation == operation) {
    destination_ = nullptr;
  }
}

void TcpReceiver::sayBack(std::string_view frame) {
  if (fd_.valid()) {
    static_cast<void>(::send(fd_.get(), frame.data(), frame.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
  }
}

void TcpReceiver::onEvents(uint32_t /*events*/) {
  budget_ = kReadBudgetBytes;
  try {
    while (fd_.valid() && budget_ > 0 && readOnce()) {
    }
  } catch (const std::exception& error) {
    owner_.onBroken(peer_, Direction::kIncoming, "cannot receive from rank " + std::to_string(peer_) + ": this rank failed (" + error.what() + ")");
  }
}

bool TcpReceiver::readOnce() {
  if (staged_begin_ > 0) {
    std::memmove(staging_.get(), staging_.get() + staged_begin_, numStaged());
    staged_end_ = numStaged();
    staged_begin_ = 0;
  }
  std::array<iovec, 2> vectors{};
  size_t count = 0;
  // consume() leaves nothing staged while a payload is unfinished.
  const int64_t direct = phase_ == Phase::kPayload && destination_ != nullptr ? left_bytes_ : 0;
  if (direct > 0) {
    vectors[count++] = {destination_, static_cast<size_t>(direct)};
  }
  vectors[count++] = {staging_.get() + staged_end_, kStagingBytes - staged_end_};
  const ssize_t got = ::readv(fd_.get(), vectors.data(), static_cast<int>(count));
  if (got == 0 || (got < 0 && (errno == ECONNRESET || errno == EPIPE))) {
    owner_.onBroken(peer_, Direction::kIncoming, "connection reset by peer: rank " + std::to_string(peer_) + " ended without goodbye");
    return false;
  }
  if (got < 0) {
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
      const bool is_shortage = isLocalShortage(errno);
      owner_.onBroken(peer_, Direction::kIncoming,
                      "cannot receive from rank " + std::to_string(peer_) + ": " +
                          (is_shortage ? "this rank is short of resources (" + errnoText(errno) + ")" : errnoText(errno)));
    }
    return false;
  }
  const int64_t to_destination = std::min<int64_t>(got, direct);
  if (direct > 0) {
    destination_ += to_destination;
    left_bytes_ -= to_destination;
  }
  const size_t asked = vectors[0].iov_len + vectors[1].iov_len;
  staged_end_ += static_cast<size_t>(got - to_destination);
  budget_ -= got;
  consume();
  return static_cast<size_t>(got) == asked;
}

void TcpReceiver::consume() {
  bool goes_on = true;
  while (goes_on && fd_.valid()) {
    switch (phase_) {
      case Phase::kHeader:
        goes_on = consumeHeader();
        break;
      case Phase::kText:
        goes_on = consumeText();
        break;
      case Phase::kPayload:
        goes_on = consumePayload();
        break;
      case Phase::kStatus:
        goes_on = consumeStatus();
        break;
    }
  }
}

bool TcpReceiver::consumeHeader() {
  if (numStaged() < kFrameHeaderBytes) {
    return false;
  }
  const auto header = decodeFrameHeader(std::span<const char, kFrameHeaderBytes>(staging_.get() + staged_begin_, kFrameHeaderBytes));
  if (!header) {
    refuse("protocol error: rank " + std::to_string(peer_) + " sent bytes that are no frame");
    return false;
  }
  staged_begin_ += kFrameHeaderBytes;
  header_ = *header;
  switch (header_.kind) {
    case FrameKind::kControl:
    case FrameKind::kError:
      phase_ = Phase::kText;
      left_bytes_ = header_.num_bytes;
      break;
    case FrameKind::kReady:
      owner_.onReadyFrame(peer_, header_.operation, header_.num_bytes);
      break;
    case FrameKind::kGoodbye:
      owner_.onGoodbyeFrame(peer_, header_.num_bytes == kGoodbyeFinal);
      break;
    case FrameKind::kData:
      startData();
      break;
    case FrameKind::kRing:
      openRing();
      break;
    case FrameKind::kRingData:
      readFromRing();
      break;
    case FrameKind::kRingTaken:
      if (!owner_.onRingTakenFrame(peer_, header_.num_bytes)) {
        refuse("protocol error: rank " + std::to_string(peer_) + " has taken what was not in the ring");
      }
      break;
  }
  return true;
}

bool TcpReceiver::consumeText() {
  // Grows with what has arrived, never by what the header promises.
  const size_t take = std::min(numStaged(), static_cast<size_t>(left_bytes_));
  text_.append(staging_.get() + staged_begin_, take);
  staged_begin_ += take;
  left_bytes_ -= static_cast<int64_t>(take);
  if (left_bytes_ > 0) {
    return false;
  }
  phase_ = Phase::kHeader;
  std::string text = std::exchange(text_, {});
  if (header_.kind == FrameKind::kError) {
    owner_.onProtocolError(peer_, text);
  } else {
    owner_.onControlFrame(peer_, std::move(text));
  }
  return true;
}

void TcpReceiver::startData() {
  phase_ = Phase::kPayload;
  left_bytes_ = header_.num_bytes;
  destination_ = whereToRead();
}

void TcpReceiver::openRing() {
  if (ring_) {
    refuse("protocol error: rank " + std::to_string(peer_) + " offered a second ring");
    return;
  }
  if (may_share_memory_) {
    ring_ = RingReader::open({header_.num_bytes, header_.message_bytes, header_.operation.call});
  }
  owner_.onRingTaken(peer_, ring_ ? 0 : kRingRefused);
}

void TcpReceiver::readFromRing() {
  if (!ring_) {
    refuse("protocol error: rank " + std::to_string(peer_) + " sent bytes in a ring that is not mapped");
    return;
  }
  char* const destination = whereToRead();
  if (!fd_.valid()) {
    return;
  }
  ring_->read(destination, header_.num_bytes);
  budget_ -= header_.num_bytes;
  owner_.onRingTaken(peer_, ring_->numTaken());
  finishData();
}

char* TcpReceiver::whereToRead() {
  const auto found = streams_.find(header_.operation);
  if (found == streams_.end()) {
    return nullptr;  // closed meanwhile
  }
  const Stream& stream = found->second;
  if (stream.receives.empty()) {
    refuse("protocol error: " + describeMessage(stream) + " came without a posted receive");
    return nullptr;
  }
  const Receive& receive = stream.receives.front();
  if (header_.message_bytes != receive.num_bytes) {
    refuse("protocol error: " + describeMessage(stream) + " has " + std::to_string(header_.message_bytes) + " bytes, its receive expects " +
           std::to_string(receive.num_bytes));
  } else if (receive.received_bytes + header_.num_bytes > receive.num_bytes || (header_.num_bytes == 0 && receive.num_bytes != 0)) {
    refuse("protocol error: a frame of " + describeMessage(stream) + " does not fit");
  } else {
    return receive.data + receive.received_bytes;
  }
  return nullptr;
}

std::string TcpReceiver::describeMessage(const Stream& stream) const {
  return "message " + std::to_string(stream.num_done) + " of operation " + header_.operation.str() + " from rank " + std::to_string(peer_) +
         " to rank " + std::to_string(own_rank_);
}

bool TcpReceiver::consumePayload() {
  const size_t take = std::min(numStaged(), static_cast<size_t>(left_bytes_));
  if (destination_ != nullptr && take > 0) {
    std::memcpy(destination_, staging_.get() + staged_begin_, take);
    destination_ += take;
  }
  staged_begin_ += take;
  left_bytes_ -= static_cast<int64_t>(take);
  if (left_bytes_ > 0) {
    return false;
  }
  phase_ = Phase::kStatus;
  return true;
}

bool TcpReceiver::consumeStatus() {
  if (numStaged() == 0) {
    return false;
  }
  const bool is_ok = staging_[staged_begin_++] == static_cast<char>(FrameStatus::kOk);
  phase_ = Phase::kHeader;
  destination_ = nullptr;
  if (is_ok) {
    finishData();
  }
  return true;
}

void TcpReceiver::finishData() {
  const auto found = streams_.find(header_.operation);
  if (found == streams_.end()) {
    return;
  }
  Stream& stream = found->second;
  Receive& receive = stream.receives.front();
  receive.received_bytes += header_.num_bytes;
  if (receive.received_bytes == receive.num_bytes) {
    owner_.onReceiveDone(header_.operation, receive.cookie);
    stream.receives.pop_front();
    ++stream.num_done;
  }
}

void TcpReceiver::refuse(const std::string& reason) {
  std::string frame;
  const std::string text = reason.substr(0, static_cast<size_t>(kMaxErrorBytes));
  appendFrame({FrameKind::kError, 0, static_cast<int64_t>(text.size()), 0}, text, frame);
  sayBack(frame);
  owner_.onProtocolError(peer_, reason);
}

}  // namespace xmesh::transport
