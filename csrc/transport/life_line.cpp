#include "transport/life_line.h"

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <utility>

namespace xmesh::transport {
namespace {

constexpr int kBacklog = 4096;
constexpr size_t kLongestLine = 4096;
constexpr char kFarewell = '.';  ///< all that is ever sent to those who are connected

/// What has happened at a socket, without waiting.
int16_t eventsOf(int fd) {
  pollfd entry{fd, POLLIN | POLLOUT | POLLRDHUP, 0};
  return ::poll(&entry, 1, 0) > 0 ? entry.revents : int16_t{0};
}

}  // namespace

LifeLine::LifeLine(const std::string& host) : socket_(listenOn(host, kBacklog)) {}

std::string LifeLine::address() const { return SocketAddress::ofSocket(socket_.get()).str(); }

void LifeLine::accept() {
  while (socket_.valid() && callers_.size() < kBacklog) {
    Fd caller(::accept4(socket_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!caller.valid()) {
      return;
    }
    callers_.push_back({std::move(caller), {}});
  }
}

bool LifeLine::read(Caller& caller, std::vector<std::string>& lines) {
  std::array<char, kLongestLine> bytes{};
  bool is_there = true;
  while (caller.text.size() < kLongestLine) {
    const ssize_t got = ::recv(caller.socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got <= 0) {
      is_there = got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
      break;
    }
    caller.text.append(bytes.data(), static_cast<size_t>(got));
  }
  for (size_t end = caller.text.find('\n'); end != std::string::npos; end = caller.text.find('\n')) {
    lines.push_back(caller.text.substr(0, end));
    caller.text.erase(0, end + 1);
  }
  return is_there;
}

std::vector<std::string> LifeLine::hear() {
  accept();
  std::vector<std::string> lines;
  std::erase_if(callers_, [&](Caller& caller) { return !read(caller, lines); });
  return lines;
}

void LifeLine::end(bool says_farewell) noexcept {
  try {
    accept();
  } catch (const std::exception&) {
    callers_.clear();  // no memory: it looks like a death
  }
  for (const Caller& caller : callers_) {
    if (says_farewell) {
      ::send(caller.socket.get(), &kFarewell, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    ::shutdown(caller.socket.get(), SHUT_RDWR);
  }
  callers_.clear();
  if (socket_.valid()) {
    ::shutdown(socket_.get(), SHUT_RDWR);
    socket_.reset();
  }
}

LifeWatch::LifeWatch(const std::string& address)
    : address_(SocketAddress::parse(address)), socket_(::socket(address_.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {
  if (socket_.valid() && ::connect(socket_.get(), address_.raw(), address_.length) != 0) {
    is_gone_ = errno == ECONNREFUSED || errno == ECONNRESET;
  }
}

bool LifeWatch::isGone() {
  if (is_gone_ || !socket_.valid()) {
    return is_gone_;
  }
  const int16_t events = eventsOf(socket_.get());
  if ((events & (POLLERR | POLLHUP | POLLRDHUP)) != 0) {
    const int error = pendingError(socket_.get());
    is_gone_ = error == 0 || error == ECONNREFUSED || error == ECONNRESET || error == EPIPE;  // the last: it went before it had heard all
    char said = 0;
    const bool was_there = is_gone_ && error != ECONNREFUSED;
    has_left_ = was_there && ::recv(socket_.get(), &said, 1, MSG_DONTWAIT) == 1 && said == kFarewell;
    has_died_ = was_there && !has_left_;
    socket_.reset();  // no way there at the moment is no end
  } else if (events != 0 && isConnectedToItself(socket_.get())) {
    is_gone_ = true;
  }
  return is_gone_;
}

bool LifeWatch::hasDied() { return isGone() && has_died_; }

bool LifeWatch::hasLeft() { return isGone() && has_left_; }

bool LifeWatch::isConnected() { return !isGone() && socket_.valid() && (eventsOf(socket_.get()) & POLLOUT) != 0; }

void LifeWatch::tell(const std::string& line) {
  if (isConnected()) {
    const std::string text = line + "\n";
    ::send(socket_.get(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
}

}  // namespace xmesh::transport
