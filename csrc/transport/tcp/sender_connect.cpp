#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "transport/tcp/sender.h"

namespace xmesh::transport {
namespace {

constexpr int kUnsentLimitBytes = 512 << 10;
constexpr std::chrono::milliseconds kFirstBackoff{5};
constexpr std::chrono::milliseconds kLastBackoff{200};

bool isWorthARetry(int error) {
  return error == ECONNREFUSED || error == ECONNRESET || error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH ||
         error == EADDRNOTAVAIL || error == EAGAIN;
}

}  // namespace

void TcpSender::connect(const SocketAddress& address, std::chrono::milliseconds timeout, std::chrono::milliseconds refused_timeout) {
  if (state_ != State::kIdle) {
    return;
  }
  state_ = State::kConnecting;
  address_ = address;
  connect_timeout_ = timeout;
  refused_timeout_ = refused_timeout;
  connect_deadline_ = EventLoop::Clock::now() + timeout;
  backoff_ = kFirstBackoff;
  // Not at once, so that a failure is not reported from inside the caller's call.
  timer_ = loop_.startTimer(std::chrono::milliseconds(0), [this] { tryConnect(); });
}

void TcpSender::tryConnect() {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(connect_deadline_ - EventLoop::Clock::now());
  timer_ = loop_.startTimer(left, [this] { onConnectTimeout(); });
  fd_ = Fd(::socket(address_.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd_.valid()) {
    breakDown("cannot open a socket to", errno);
    return;
  }
  setNoDelay(fd_.get());
  setUnsentLimit(fd_.get(), kUnsentLimitBytes);
  if (pacing_rate_ != 0) {
    setPacingRate(fd_.get(), pacing_rate_);
  }
  if (::connect(fd_.get(), address_.raw(), address_.length) == 0 || errno == EINPROGRESS) {
    registration_ = loop_.add(fd_.get(), EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, *this);
  } else {
    onConnectFailed(errno);
  }
}

void TcpSender::onConnectFailed(int error) {
  closeSocket();
  loop_.cancelTimer(std::exchange(timer_, 0));
  connect_error_ = error;
  if (error == ECONNREFUSED && refused_timeout_ < connect_timeout_) {
    connect_deadline_ -= connect_timeout_ - refused_timeout_;
    connect_timeout_ = refused_timeout_;
  }
  if (!isWorthARetry(error) || !owner_.mayStillListen(peer_)) {
    breakDown("cannot connect to", error);
  } else if (EventLoop::Clock::now() + backoff_ >= connect_deadline_) {
    onConnectTimeout();
  } else {
    timer_ = loop_.startTimer(backoff_, [this] { tryConnect(); });
    backoff_ = std::min(backoff_ * 2, kLastBackoff);
  }
}

void TcpSender::onConnectTimeout() {
  owner_.onBroken(peer_, Direction::kOutgoing,
                  "cannot connect to rank " + std::to_string(peer_) + " at " + address_.str() + " within " +
                      std::to_string(connect_timeout_.count()) + " ms: " + (connect_error_ != 0 ? errnoText(connect_error_) : "no answer"));
}

void TcpSender::onConnected() {
  loop_.cancelTimer(std::exchange(timer_, 0));
  state_ = State::kConnected;
  may_share_memory_ = may_share_memory_ && SocketAddress::ofSocket(fd_.get()).isSameHost(address_);
  owner_.wantFlush(peer_);
}

}  // namespace xmesh::transport
