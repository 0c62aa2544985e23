#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <utility>

namespace xmesh::transport {

/// Owns a file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() { reset(); }
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

/// A numeric IPv4 or IPv6 address with its port.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  int family() const { return storage.ss_family; }
  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* raw() { return reinterpret_cast<sockaddr*>(&storage); }
  /// "127.0.0.1:4711", "[::1]:4711"
  std::string str() const;
  /// Whether both have the same IP address, whatever their ports.
  bool isSameHost(const SocketAddress& other) const;
  /// Reads what str() writes; asks no name service. Throws std::invalid_argument naming the text.
  static SocketAddress parse(const std::string& text);
  /// A host name or numeric address, which may ask the name service, with port 0. Throws std::invalid_argument.
  static SocketAddress resolve(const std::string& host);
  /// The address a socket is bound to.
  static SocketAddress ofSocket(int fd);
};

/// Listens on a free port of `host`; non-blocking. Throws std::system_error.
Fd listenOn(const std::string& host, int backlog);
/// No delay of small writes.
void setNoDelay(int fd);
/// Lets the kernel take at most about this much beyond what is on the wire, so that what is queued late is not late.
void setUnsentLimit(int fd, int num_bytes);
/// Limits the rate of a socket in bytes per second; 0 lifts the limit.
void setPacingRate(int fd, int64_t bytes_per_s);
/// The error pending on a socket, as an errno value; 0 when there is none.
int pendingError(int fd);
/// Whether a non-blocking connect ended up at the socket itself, which happens when nobody listens on a local ephemeral port.
bool isConnectedToItself(int fd);
std::string errnoText(int error);
/// Whether an errno value tells of a lack of resources of this process or machine.
bool isLocalShortage(int error);

}  // namespace xmesh::transport
