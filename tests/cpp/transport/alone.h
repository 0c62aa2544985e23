#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/network_cluster.h"
#include "transport/raw_socket.h"
#include "transport/tcp/network.h"

namespace xmesh::transport::test {

/// A network of two ranks whose other rank the test plays by hand.
class Alone {
 public:
  explicit Alone(TcpNetworkOptions options = {}) {
    options.log = [this](const std::string& line) {
      const std::lock_guard lock(monitor_.mutex);
      lines_.push_back(line);
      monitor_.changed.notify_all();
    };
    network_ = std::make_unique<TcpNetwork>(options, recorder_);
  }
  TcpNetwork& network() { return *network_; }
  void destroyNetwork() { network_.reset(); }
  Told& told() { return recorder_.told; }
  Recorder& recorder() { return recorder_; }
  const std::vector<std::string>& lines() const { return lines_; }
  bool waitFor(const std::function<bool()>& done) {
    std::unique_lock lock(monitor_.mutex);
    return monitor_.changed.wait_until(lock, std::chrono::system_clock::now() + std::chrono::minutes(1), done);
  }
  Told::Loss waitLoss() {
    EXPECT_TRUE(waitFor([this] { return !told().losses.empty(); }));
    return told().losses.at(0);
  }
  /// Runs `task` with the peer's address set.
  void call(const std::string& peer_address, const std::function<void(TcpNetwork&)>& task) {
    network_->post([=, this] {
      network_->setAddress(1, peer_address);
      task(*network_);
    });
  }

 private:
  Monitor monitor_;
  std::vector<std::string> lines_;
  Recorder recorder_{monitor_};
  std::unique_ptr<TcpNetwork> network_;
};

inline std::string addressOf(const Fd& fd) { return SocketAddress::ofSocket(fd.get()).str(); }

}  // namespace xmesh::transport::test
