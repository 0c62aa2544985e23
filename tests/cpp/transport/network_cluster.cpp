#include "transport/network_cluster.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <random>

namespace xmesh::transport::test {

class Recorder::Operation final : public OperationEvents {
 public:
  Operation(Recorder& recorder, OperationId id) : recorder_(recorder), id_(id) {}
  void onSent(int64_t cookie) override {
    const std::lock_guard lock(recorder_.monitor_.mutex);
    recorder_.told.sent[id_].push_back(cookie);
    recorder_.monitor_.changed.notify_all();
  }
  void onReceived(int64_t cookie) override {
    const std::lock_guard lock(recorder_.monitor_.mutex);
    recorder_.told.received[id_].push_back(cookie);
    recorder_.told.received_of_all.push_back(cookie);
    recorder_.monitor_.changed.notify_all();
  }

 private:
  Recorder& recorder_;
  const OperationId id_;
};

void Recorder::onControl(int32_t peer, std::string message) {
  const std::lock_guard lock(monitor_.mutex);
  told.controls.emplace_back(peer, std::move(message));
  monitor_.changed.notify_all();
}

void Recorder::onPeerLost(int32_t peer, const std::string& reason, bool is_goodbye) {
  const std::lock_guard lock(monitor_.mutex);
  told.losses.push_back({peer, reason, is_goodbye});
  monitor_.changed.notify_all();
}

OperationEvents& Recorder::operation(OperationId operation) {
  const std::lock_guard lock(monitor_.mutex);
  auto& events = operations_[operation];
  if (!events) {
    events = std::make_unique<Operation>(*this, operation);
  }
  return *events;
}

void Cluster::open(int32_t rank, OperationId operation) {
  call(rank, [&] { network(rank).open(operation, recorder(rank).operation(operation)); });
}

void Cluster::close(int32_t rank, OperationId operation) {
  call(rank, [&] { network(rank).close(operation); });
}

void Cluster::send(int32_t rank, OperationId operation, int32_t peer, const std::vector<char>& data, int64_t cookie) {
  call(rank, [&] { network(rank).send(operation, peer, data.data(), static_cast<int64_t>(data.size()), cookie); });
}

void Cluster::recv(int32_t rank, OperationId operation, int32_t peer, std::vector<char>& data, int64_t cookie) {
  call(rank, [&] { network(rank).recv(operation, peer, data.data(), static_cast<int64_t>(data.size()), cookie); });
}

void Cluster::control(int32_t rank, int32_t peer, const std::string& message) {
  call(rank, [&] { network(rank).sendControl(peer, message); });
}

bool Cluster::fence(int32_t from, int32_t to) {
  const std::pair<int32_t, std::string> mark(from, "fence " + std::to_string(num_fences_++));
  control(from, to, mark.second);
  return waitFor([&] { return std::ranges::find(told(to).controls, mark) != told(to).controls.end(); });
}

FakeCluster::FakeCluster(int32_t size, uint64_t seed) : network_(size, seed) {
  for (int32_t rank = 0; rank < size; ++rank) {
    recorders_.push_back(std::make_unique<Recorder>(monitor_));
    endpoints_.push_back(network_.join(rank, *recorders_.back()));
    for (int32_t peer = 0; peer < size; ++peer) {
      if (peer != rank) {
        endpoints_.back()->setAddress(peer, "fake:" + std::to_string(peer));
      }
    }
  }
}

void FakeCluster::call(int32_t rank, const std::function<void()>& task) {
  bool has_run = false;
  network(rank).post([&] {
    task();
    has_run = true;
  });
  network_.runUntil([&] { return has_run; });
}

TcpCluster::TcpCluster(int32_t size, const TcpNetworkOptions& options, int32_t unwilling) {
  for (int32_t rank = 0; rank < size; ++rank) {
    TcpNetworkOptions own = options;
    own.own_peer = rank;
    own.shared_memory = own.shared_memory && rank != unwilling;
    recorders_.push_back(std::make_unique<Recorder>(monitor_));
    networks_.push_back(std::make_unique<TcpNetwork>(own, *recorders_.back()));
  }
  for (int32_t rank = 0; rank < size; ++rank) {
    call(rank, [&, rank] {
      for (int32_t peer = 0; peer < size; ++peer) {
        if (peer != rank) {
          network(rank).setAddress(peer, network(peer).address());
        }
      }
    });
  }
}

void TcpCluster::call(int32_t rank, const std::function<void()>& task) {
  std::promise<void> has_run;
  network(rank).post([&] {
    try {
      task();
      has_run.set_value();
    } catch (...) {
      has_run.set_exception(std::current_exception());
    }
  });
  has_run.get_future().get();
}

bool TcpCluster::waitFor(const std::function<bool()>& done) {
  std::unique_lock lock(monitor_.mutex);
  return monitor_.changed.wait_until(lock, std::chrono::system_clock::now() + std::chrono::minutes(1), done);
}

std::vector<char> randomBytes(size_t num_bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<char> bytes(num_bytes);
  for (size_t i = 0; i < num_bytes; i += 8) {
    const uint64_t word = random();
    for (size_t j = i; j < std::min(i + 8, num_bytes); ++j) {
      bytes[j] = static_cast<char>(word >> (8 * (j - i)));
    }
  }
  return bytes;
}

}  // namespace xmesh::transport::test
