#include "transport/life_line.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

namespace xmesh::transport {
namespace {

constexpr int kBacklog = 4096;

}  // namespace

LifeLine::LifeLine(const std::string& host) : socket_(listenOn(host, kBacklog)) {}

std::string LifeLine::address() const { return SocketAddress::ofSocket(socket_.get()).str(); }

void LifeLine::end() noexcept {
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
  pollfd entry{socket_.get(), POLLIN | POLLOUT | POLLRDHUP, 0};
  if (::poll(&entry, 1, 0) <= 0) {
    return false;
  }
  if ((entry.revents & (POLLERR | POLLHUP | POLLRDHUP)) != 0) {
    const int error = pendingError(socket_.get());
    is_gone_ = error == 0 || error == ECONNREFUSED || error == ECONNRESET;
    socket_.reset();  // no way there at the moment is no end
  } else if (isConnectedToItself(socket_.get())) {
    is_gone_ = true;
  }
  return is_gone_;
}

}  // namespace xmesh::transport
