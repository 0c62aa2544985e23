#include "transport/socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <system_error>

namespace xmesh::transport {
namespace {

SocketAddress lookUp(const std::string& host, const std::string& port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
  if (error != 0 || found == nullptr) {
    throw std::invalid_argument("no usable address \"" + host + "\", port \"" + port + "\": " + ::gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  SocketAddress address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.length = found->ai_addrlen;
  return address;
}

SocketAddress nameOf(int fd, int (*call)(int, sockaddr*, socklen_t*)) {
  SocketAddress address;
  address.length = sizeof(address.storage);
  if (call(fd, address.raw(), &address.length) != 0) {
    throw std::system_error(errno, std::generic_category(), "address of a socket");
  }
  return address;
}

}  // namespace

void Fd::reset() {
  if (fd_ >= 0) {
    ::close(std::exchange(fd_, -1));
  }
}

std::string SocketAddress::str() const {
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (::getnameinfo(raw(), length, host.data(), host.size(), port.data(), port.size(), NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "unknown address";
  }
  const std::string text = host.data();
  return (family() == AF_INET6 ? "[" + text + "]" : text) + ":" + port.data();
}

bool SocketAddress::isSameHost(const SocketAddress& other) const {
  if (family() != other.family()) {
    return false;
  }
  if (family() == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(raw())->sin_addr.s_addr == reinterpret_cast<const sockaddr_in*>(other.raw())->sin_addr.s_addr;
  }
  const auto* const own = reinterpret_cast<const sockaddr_in6*>(raw());
  const auto* const others = reinterpret_cast<const sockaddr_in6*>(other.raw());
  return family() == AF_INET6 && std::memcmp(&own->sin6_addr, &others->sin6_addr, sizeof(own->sin6_addr)) == 0;
}

SocketAddress SocketAddress::parse(const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == text.size()) {
    throw std::invalid_argument("address \"" + text + "\" is not of the form host:port");
  }
  std::string host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  return lookUp(host, text.substr(colon + 1), AI_NUMERICHOST | AI_NUMERICSERV);
}

SocketAddress SocketAddress::resolve(const std::string& host) { return lookUp(host, "0", AI_NUMERICSERV); }

SocketAddress SocketAddress::ofSocket(int fd) { return nameOf(fd, &::getsockname); }

Fd listenOn(const std::string& host, int backlog) {
  const SocketAddress address = SocketAddress::resolve(host);
  Fd fd(::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid() || ::bind(fd.get(), address.raw(), address.length) != 0 || ::listen(fd.get(), backlog) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot listen on \"" + host + "\"");
  }
  return fd;
}

void setNoDelay(int fd) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

void setUnsentLimit(int fd, int num_bytes) { ::setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &num_bytes, sizeof(num_bytes)); }

void setPacingRate(int fd, int64_t bytes_per_s) {
  const uint64_t rate = bytes_per_s > 0 ? static_cast<uint64_t>(bytes_per_s) : ~uint64_t{0};
  ::setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof(rate));
}

int pendingError(int fd) {
  int error = 0;
  socklen_t length = sizeof(error);
  return ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 ? error : errno;
}

bool isConnectedToItself(int fd) { return nameOf(fd, &::getsockname).str() == nameOf(fd, &::getpeername).str(); }

std::string errnoText(int error) { return std::generic_category().message(error); }

bool isLocalShortage(int error) { return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM; }

}  // namespace xmesh::transport
