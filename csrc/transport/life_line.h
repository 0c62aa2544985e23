#pragma once

#include <string>
#include <vector>

#include "transport/socket.h"

namespace xmesh::transport {

/// A listening socket at which nobody answers: who is connected to it learns that this process has ended, or that its owner has. It needs no thread
/// and no messages. What others tell() stays with the kernel until somebody asks, also where they have ended since. Threading: one thread at a time.
class LifeLine {
 public:
  /// Throws std::system_error where it cannot listen on `host`.
  explicit LifeLine(const std::string& host);
  /// "host:port"
  std::string address() const;
  /// The lines that others have told here since the last time, whoever they are. Does not block.
  std::vector<std::string> hear();
  /// Those who are connected see it; also in the name of forked children, which hold the socket too. Idempotent. Without a farewell it looks like a
  /// death.
  void end(bool says_farewell = true) noexcept;

 private:
  struct Caller {
    Fd socket;
    std::string text;  ///< the beginning of a line
  };
  void accept();
  /// False: the caller has ended.
  static bool read(Caller& caller, std::vector<std::string>& lines);

  Fd socket_;
  std::vector<Caller> callers_;  ///< open while they are: an end here would be taken for this line's
};

/// The other end. Threading: one thread at a time.
class LifeWatch {
 public:
  explicit LifeWatch(const std::string& address);
  /// Whether the other process, or the owner of its line, has ended. Does not block. A machine that is cut off looks alive.
  bool isGone();
  /// Whether the other end was reached, which it is once at most. Does not block.
  bool isConnected();
  /// Sends a line (without its end) to the other end, if it is connected. Does not block; what cannot be sent at once is not.
  void tell(const std::string& line);
  /// Whether the other end was there when this connected, and has ended since without a farewell; or with one. Does not block. Of an end that had
  /// gone before nobody knows.
  bool hasDied();
  bool hasLeft();

 private:
  SocketAddress address_;
  Fd socket_;
  bool is_gone_ = false;
  bool has_died_ = false;
  bool has_left_ = false;
};

}  // namespace xmesh::transport
