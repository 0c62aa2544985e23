#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "transport/host_transport.h"

namespace xmesh::replay {

/// A HostTransport that only writes down what it is asked to do; the test says what completes. For the operations of one executor.
class ManualTransport final : public transport::HostTransport {
 public:
  struct Posted {
    transport::OperationId operation = 0;
    int32_t peer = 0;
    const void* data = nullptr;
    int64_t num_bytes = 0;
    int64_t cookie = 0;
  };

  void post(std::function<void()> task) override { tasks.push_back(std::move(task)); }
  void open(transport::OperationId operation, transport::OperationEvents& to) override {
    events = &to;
    open_operations.insert(operation);
  }
  void send(transport::OperationId operation, int32_t peer, const void* data, int64_t num_bytes, int64_t cookie) override {
    sends.push_back({operation, peer, data, num_bytes, cookie});
    if (completes_sends_inside) {
      events->onSent(cookie);
    }
  }
  void recv(transport::OperationId operation, int32_t peer, void* data, int64_t num_bytes, int64_t cookie) override {
    receives.push_back({operation, peer, data, num_bytes, cookie});
  }
  void close(transport::OperationId operation) override {
    open_operations.erase(operation);
    if (open_operations.empty()) {
      events = nullptr;
    }
  }

  void runTask() {
    const std::function<void()> task = std::move(tasks.front());
    tasks.pop_front();
    task();
  }

  transport::OperationEvents* events = nullptr;  ///< null when all is closed
  std::set<transport::OperationId> open_operations;
  bool completes_sends_inside = false;
  std::vector<Posted> sends;
  std::vector<Posted> receives;
  std::deque<std::function<void()>> tasks;
};

}  // namespace xmesh::replay
