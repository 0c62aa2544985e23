#include "transport/fakes/fake_host_network.h"

#include <stdexcept>
#include <utility>

#include "transport/fakes/fake_host_world.h"

namespace xmesh::transport {
namespace {

class FakeEndpoint final : public PeerNetwork {
 public:
  FakeEndpoint(std::shared_ptr<FakeHostWorld> world, int32_t rank, PeerEvents& events) : world_(std::move(world)), rank_(rank) {
    world_->join(rank, events);
  }
  ~FakeEndpoint() override { world_->leave(rank_, true); }
  FakeEndpoint(const FakeEndpoint&) = delete;
  FakeEndpoint& operator=(const FakeEndpoint&) = delete;

  void post(std::function<void()> task) override { world_->post(rank_, std::move(task)); }
  void open(OperationId operation, OperationEvents& events) override { world_->open(rank_, operation, events); }
  void send(OperationId operation, int32_t peer, const void* data, int64_t num_bytes, int64_t cookie) override {
    world_->send(rank_, operation, peer, data, num_bytes, cookie);
  }
  void recv(OperationId operation, int32_t peer, void* data, int64_t num_bytes, int64_t cookie) override {
    world_->recv(rank_, operation, peer, data, num_bytes, cookie);
  }
  void close(OperationId operation) override { world_->close(rank_, operation); }
  void sendControl(int32_t peer, std::string message) override { world_->sendControl(rank_, peer, std::move(message)); }
  uint64_t startTimer(std::chrono::milliseconds delay, std::function<void()> task) override {
    return world_->startTimer(rank_, delay, std::move(task));
  }
  void cancelTimer(uint64_t timer) override { world_->cancelTimer(timer); }
  void setAddress(int32_t peer, std::string address) override { world_->setAddress(rank_, peer, address); }
  bool hasAddress(int32_t peer) const override { return world_->hasAddress(rank_, peer); }

 private:
  std::shared_ptr<FakeHostWorld> world_;
  const int32_t rank_;
};

}  // namespace

FakeHostNetwork::FakeHostNetwork(int32_t num_ranks, uint64_t seed) : world_(std::make_shared<FakeHostWorld>(num_ranks, seed)) {}
FakeHostNetwork::~FakeHostNetwork() = default;

std::unique_ptr<PeerNetwork> FakeHostNetwork::join(int32_t rank, PeerEvents& events) { return std::make_unique<FakeEndpoint>(world_, rank, events); }

bool FakeHostNetwork::step() { return world_->step(); }

void FakeHostNetwork::runUntilIdle(int64_t max_steps) {
  for (int64_t steps = 0; world_->step(); ++steps) {
    if (steps >= max_steps) {
      throw std::runtime_error("FakeHostNetwork::runUntilIdle: not idle after " + std::to_string(max_steps) + " steps");
    }
  }
}

bool FakeHostNetwork::runUntil(const std::function<bool()>& done, int64_t max_steps) {
  for (int64_t steps = 0; !done(); ++steps) {
    if (steps >= max_steps) {
      throw std::runtime_error("FakeHostNetwork::runUntil: not done after " + std::to_string(max_steps) + " steps");
    }
    if (!world_->step() && !world_->fireNextTimer(std::chrono::milliseconds::max())) {
      return false;
    }
  }
  return true;
}

void FakeHostNetwork::advance(std::chrono::milliseconds delay) {
  const auto limit = world_->now() + delay;
  do {
    runUntilIdle();
  } while (world_->fireNextTimer(limit));
  world_->setNow(limit);
}

void FakeHostNetwork::kill(int32_t rank) { world_->leave(rank, false); }
void FakeHostNetwork::stop(int32_t rank) { world_->setStopped(rank, true); }
void FakeHostNetwork::resume(int32_t rank) { world_->setStopped(rank, false); }

}  // namespace xmesh::transport
