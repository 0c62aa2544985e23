#include "transport/tcp/listener.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

namespace xmesh::transport {
namespace {

constexpr int kBacklog = 1024;
constexpr std::chrono::milliseconds kPause{100};
constexpr size_t kSpareHandshakes = 64;

}  // namespace

/// A connection that has not said its hello yet.
struct TcpListener::Handshake final : FdHandler {
  Handshake(TcpListener& owner, uint64_t own_id, Fd socket) : listener(owner), id(own_id), fd(std::move(socket)) {}
  ~Handshake() override {
    listener.loop_.remove(registration);
    listener.loop_.cancelTimer(timer);
  }

  void onEvents(uint32_t /*events*/) override {
    const ssize_t count = ::recv(fd.get(), bytes.data() + num_bytes, bytes.size() - num_bytes, MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
      return;
    }
    if (count <= 0) {
      listener.reject(id, "it ended before its hello");
      return;
    }
    num_bytes += static_cast<size_t>(count);
    if (!isHelloPrefix({bytes.data(), num_bytes})) {
      listener.reject(id, "its first bytes are no hello");
    } else if (num_bytes == bytes.size()) {
      listener.finish(id);
    }
  }

  TcpListener& listener;
  const uint64_t id;
  Fd fd;
  uint64_t registration = 0;
  uint64_t timer = 0;
  std::array<char, kHelloBytes> bytes{};
  size_t num_bytes = 0;
};

TcpListener::TcpListener(EventLoop& loop, const std::string& host, const Hello& own_hello, std::chrono::milliseconds handshake_timeout,
                         int32_t most_peers, Events events)
    : loop_(loop),
      own_hello_(own_hello),
      handshake_timeout_(handshake_timeout),
      most_handshakes_(static_cast<size_t>(most_peers) + kSpareHandshakes),
      events_(std::move(events)),
      fd_(listenOn(host, kBacklog)) {
  address_ = SocketAddress::ofSocket(fd_.get()).str();
}

TcpListener::~TcpListener() {
  handshakes_.clear();
  loop_.remove(registration_);
  loop_.cancelTimer(pause_timer_);
}

void TcpListener::start() { registration_ = loop_.add(fd_.get(), EPOLLIN, *this); }

void TcpListener::onEvents(uint32_t /*events*/) {
  while (true) {
    Fd fd(::accept4(fd_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd.valid()) {
      begin(std::move(fd));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return;
    } else if (errno != ECONNABORTED && errno != EINTR) {
      pause(errno);
      return;
    }
  }
}

void TcpListener::pause(int error) {
  const std::string reason = isLocalShortage(error) ? "this rank is short of resources (" + errnoText(error) + ")" : errnoText(error);
  events_.on_rejected("cannot accept connections on " + address_ + " for now: " + reason);
  loop_.remove(std::exchange(registration_, 0));
  pause_timer_ = loop_.startTimer(kPause, [this] { start(); });
}

void TcpListener::begin(Fd fd) {
  if (handshakes_.size() >= most_handshakes_) {
    reject(handshakes_.begin()->first, "too many connections without a hello");
  }
  const uint64_t id = next_id_++;
  auto handshake = std::make_unique<Handshake>(*this, id, std::move(fd));
  handshake->registration = loop_.add(handshake->fd.get(), EPOLLIN, *handshake);
  handshake->timer = loop_.startTimer(handshake_timeout_, [this, id] { reject(id, "no hello in time"); });
  handshakes_.emplace(id, std::move(handshake));
}

void TcpListener::reject(uint64_t id, const std::string& reason) {
  handshakes_.erase(id);
  events_.on_rejected("dropped a connection to " + address_ + ": " + reason);
}

void TcpListener::finish(uint64_t id) {
  const auto hello = decodeHello(handshakes_.at(id)->bytes);
  if (!hello || !equalTokens(hello->token, own_hello_.token)) {
    reject(id, hello ? "its token is another" : "it speaks another version");
  } else if (hello->peer > std::numeric_limits<int32_t>::max() || hello->peer == own_hello_.peer) {
    reject(id, "it says it is rank " + std::to_string(hello->peer));
  } else {
    const std::unique_ptr<Handshake> handshake = std::move(handshakes_.extract(id).mapped());
    loop_.remove(std::exchange(handshake->registration, 0));
    events_.on_peer(static_cast<int32_t>(hello->peer), std::move(handshake->fd));
  }
}

}  // namespace xmesh::transport
