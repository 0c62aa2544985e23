// A BackendTransport over the emulated accelerator's backend keeps what every StreamTransport promises. All ranks are in this process, each on a line
// of its own.
#include "c10d/stream/backend_transport.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "backend.h"
#include "runtime.h"
#include "transport/stream_conformance.h"

namespace xmesh::transport::test {
namespace {

using c10d_backend::BackendTransport;
using c10d_backend::DeviceLine;

constexpr std::chrono::seconds kPatience{20};  ///< a run that takes longer waits for ever
const c10::Device kDevice(emu::kDeviceType, 0);

/// Calls a transport on its line's thread, as its caller has to.
class OnItsLine final : public StreamTransport {
 public:
  OnItsLine(std::shared_ptr<DeviceLine> line, const c10::intrusive_ptr<::c10d::Backend>& backend)
      : line_(std::move(line)), transport_(std::make_unique<BackendTransport>(backend, line_, threads_)) {}
  ~OnItsLine() override {
    transport_.reset();
    line_->close();
  }

  std::future<void> connect() {
    return post([this] { transport_->connect(); });
  }
  std::future<void> passed() {
    auto told = std::make_shared<std::promise<void>>();
    std::future<void> out = told->get_future();
    line_->post([this, told] { line_->whenPassed([told](const std::string* /*error*/) { told->set_value(); }); });
    return out;
  }

  void connectWays(std::span<const int32_t> send_to, std::span<const int32_t> receive_from) override {
    post([=, this] { transport_->connectWays(send_to, receive_from); }).get();
  }
  void groupBegin() override {
    post([this] { transport_->groupBegin(); }).get();
  }
  void groupEnd() override {
    post([this] { transport_->groupEnd(); }).get();
  }
  void enqueueSend(int32_t peer, const void* data, int64_t num_bytes) override {
    post([=, this] { transport_->enqueueSend(peer, data, num_bytes); }).get();
  }
  void enqueueRecv(int32_t peer, void* data, int64_t num_bytes) override {
    post([=, this] { transport_->enqueueRecv(peer, data, num_bytes); }).get();
  }
  void enqueueBroadcast(int32_t root, void* data, int64_t num_bytes) override {
    post([=, this] { transport_->enqueueBroadcast(root, data, num_bytes); }).get();
  }
  void enqueue(std::function<void(void* stream)> launch) override {
    post([this, &launch] { transport_->enqueue(std::move(launch)); }).get();
  }
  void whenReached(std::function<void(const StreamFailure* failure)> told) override {
    post([this, &told] { transport_->whenReached(std::move(told)); }).get();
  }
  void abort(const StreamFailure& failure) noexcept override { transport_->abort(failure); }

 private:
  template <typename Task>
  std::future<void> post(Task task) {
    auto packaged = std::make_shared<std::packaged_task<void()>>(std::move(task));
    std::future<void> out = packaged->get_future();
    line_->post([packaged] { (*packaged)(); });
    return out;
  }

  const std::shared_ptr<DeviceLine> line_;
  const std::shared_ptr<c10d_backend::CommunicatorThreads> threads_ = std::make_shared<c10d_backend::CommunicatorThreads>();
  std::unique_ptr<BackendTransport> transport_;
};

class EmulatedCluster final : public StreamCluster {
 public:
  explicit EmulatedCluster(int32_t num_ranks) : num_ranks_(num_ranks), store_(c10::make_intrusive<::c10d::HashStore>()) {}

  StreamTransport& transport(int32_t rank, int32_t communicator) override {
    std::vector<std::unique_ptr<OnItsLine>>& ranks = communicators_[communicator];
    if (ranks.empty()) {
      make(communicator, ranks);
    }
    return *ranks.at(static_cast<size_t>(rank));
  }

  bool run() override {
    std::vector<std::future<void>> ends;
    for (const auto& [communicator, ranks] : communicators_) {
      for (const auto& rank : ranks) {
        ends.push_back(rank->passed());
      }
    }
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    return std::all_of(ends.begin(), ends.end(), [&](const std::future<void>& end) { return end.wait_until(deadline) == std::future_status::ready; });
  }

  std::shared_ptr<void> allocate(size_t num_bytes) override {
    // The device's memory is the host's.
    auto tensor = std::make_shared<at::Tensor>(at::empty({static_cast<int64_t>(num_bytes)}, at::TensorOptions(at::kByte).device(kDevice)));
    emu::currentWorker(kDevice.index()).synchronize();  // it writes into new memory, too
    return {tensor, tensor->data_ptr()};
  }
  void write(void* memory, const std::vector<char>& bytes) override { std::copy(bytes.begin(), bytes.end(), static_cast<char*>(memory)); }
  std::vector<char> read(const void* memory, size_t num_bytes) override {
    const char* begin = static_cast<const char*>(memory);
    return {begin, begin + num_bytes};
  }

 private:
  void make(int32_t communicator, std::vector<std::unique_ptr<OnItsLine>>& ranks) {
    const auto store = c10::make_intrusive<::c10d::PrefixStore>(std::to_string(communicator), store_);
    std::vector<std::future<void>> connected;
    for (int32_t rank = 0; rank < num_ranks_; ++rank) {
      auto backend = c10::make_intrusive<emu::EmuNccl>(store, rank, num_ranks_, std::chrono::milliseconds(kPatience));
      ranks.push_back(std::make_unique<OnItsLine>(std::make_shared<DeviceLine>(kDevice), std::move(backend)));
      connected.push_back(ranks.back()->connect());
    }
    for (std::future<void>& one : connected) {
      one.get();
    }
  }

  const int32_t num_ranks_;
  const c10::intrusive_ptr<::c10d::Store> store_;
  std::map<int32_t, std::vector<std::unique_ptr<OnItsLine>>> communicators_;
};

INSTANTIATE_TEST_SUITE_P(Kinds, StreamConformance,
                         testing::Values(StreamKind{
                             "Emulated",
                             [](int32_t num_ranks) -> std::unique_ptr<StreamCluster> { return std::make_unique<EmulatedCluster>(num_ranks); }}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace xmesh::transport::test
