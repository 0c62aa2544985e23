#pragma once

#include <functional>
#include <mutex>
#include <utility>

#include "transport/control_network.h"

namespace xmesh::runtime {

/// The way to the network's thread for callers' threads, until the network is closed. Threading: any.
class Mailbox {
 public:
  /// Once, before anything is posted.
  void connect(transport::ControlNetwork& network) { network_ = &network; }
  /// Runs `task` on the network's thread, after the tasks posted before; false, and nothing happens, once closed.
  bool post(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    if (is_closed_) {
      return false;
    }
    network_->post(std::move(task));
    return true;
  }
  bool isClosed() {
    const std::lock_guard lock(mutex_);
    return is_closed_;
  }
  /// Nothing is posted any more when this returns; true the first time.
  bool close() {
    const std::lock_guard lock(mutex_);
    return !std::exchange(is_closed_, true);
  }

 private:
  std::mutex mutex_;
  bool is_closed_ = false;
  transport::ControlNetwork* network_ = nullptr;
};

}  // namespace xmesh::runtime
