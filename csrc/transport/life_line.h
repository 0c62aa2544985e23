#pragma once

#include <string>

#include "transport/socket.h"

namespace xmesh::transport {

/// A listening socket at which nobody answers: who is connected to it learns that this process has ended, or that its owner has. It needs no thread
/// and no messages. Threading: one thread at a time.
class LifeLine {
 public:
  /// Throws std::system_error where it cannot listen on `host`.
  explicit LifeLine(const std::string& host);
  /// "host:port"
  std::string address() const;
  /// Tells those who are connected; also in the name of forked children, which hold the socket too. Idempotent.
  void end() noexcept;

 private:
  Fd socket_;
};

/// The other end. Threading: one thread at a time.
class LifeWatch {
 public:
  explicit LifeWatch(const std::string& address);
  /// Whether the other process, or the owner of its line, has ended. Does not block. A machine that is cut off looks alive.
  bool isGone();

 private:
  SocketAddress address_;
  Fd socket_;
  bool is_gone_ = false;
};

}  // namespace xmesh::transport
