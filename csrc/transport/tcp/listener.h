#pragma once

#include <sys/types.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "transport/socket.h"
#include "transport/tcp/event_loop.h"
#include "transport/tcp/frame.h"

namespace xmesh::transport {

/// Accepts connections and lets through those that begin in time with a hello that knows the secret. Loop thread only, but for the constructor.
class TcpListener final : private FdHandler {
 public:
  struct Events {
    std::function<void(int32_t peer, Fd fd)> on_peer;
    std::function<void(const std::string& reason)> on_rejected;
  };

  /// Listens at once, on a free port of `host`; accepts after start(). Throws std::invalid_argument or std::system_error.
  TcpListener(EventLoop& loop, const std::string& host, const Hello& own_hello, std::chrono::milliseconds handshake_timeout, int32_t most_peers,
              Events events);
  ~TcpListener() override;
  TcpListener(const TcpListener&) = delete;
  TcpListener& operator=(const TcpListener&) = delete;

  void start();
  const std::string& address() const { return address_; }

 private:
  struct Handshake;

  void onEvents(uint32_t events) override;
  void begin(Fd fd);
  void finish(uint64_t id);
  void reject(uint64_t id, const std::string& reason);
  /// Out of descriptors the waiting connection would wake the loop again and again: look away for a while.
  void pause(int error);

  EventLoop& loop_;
  const Hello own_hello_;
  const std::chrono::milliseconds handshake_timeout_;
  const size_t most_handshakes_;
  Events events_;
  Fd fd_;
  std::string address_;
  uint64_t registration_ = 0;
  uint64_t pause_timer_ = 0;
  uint64_t next_id_ = 1;
  std::map<uint64_t, std::unique_ptr<Handshake>> handshakes_;  ///< oldest first
};

}  // namespace xmesh::transport
