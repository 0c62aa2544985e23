#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d/stream/device_line.h"
#include "c10d/stream/side_threads.h"
#include "transport/stream_transport.h"

namespace xmesh::c10d_backend {

/// Threads for what NCCL does not let anybody interrupt. What is still being made when a group ends is not waited for.
struct CommunicatorThreads {
  SideThreads making;
  SideThreads ending;
};

/// A StreamTransport on a line, over any c10d backend that has grouped point-to-point calls: NCCL, XCCL and their like. Its ranks are the backend's.
/// Threading: the line's thread; abort() on any, and it does not block. NCCL's own abort may, behind a busy device, as may the end of a communicator:
/// they run on side threads. It also frees the communicator, whoever is inside of it, so it first waits for the line's thread to be out.
class BackendTransport final : public transport::StreamTransport {
 public:
  BackendTransport(c10::intrusive_ptr<::c10d::Backend> backend, std::shared_ptr<DeviceLine> line, std::shared_ptr<CommunicatorThreads> threads);
  ~BackendTransport() override;
  /// Before anything is enqueued; blocks until all its ranks do so. Throws what that fails with, and at once after abort(): NCCL goes on waiting for
  /// a rank that is gone, on a side thread, which aborts what it gets in the end.
  void connect();
  BackendTransport(const BackendTransport&) = delete;
  BackendTransport& operator=(const BackendTransport&) = delete;

  void connectWays(std::span<const int32_t> send_to, std::span<const int32_t> receive_from) override;
  void groupBegin() override;
  void groupEnd() override;
  void enqueueSend(int32_t peer, const void* data, int64_t num_bytes) override;
  void enqueueRecv(int32_t peer, void* data, int64_t num_bytes) override;
  void enqueueBroadcast(int32_t root, void* data, int64_t num_bytes) override;
  void enqueue(std::function<void(void* stream)> launch) override;
  void whenReached(std::function<void(const transport::StreamFailure* failure)> told) override;
  void abort(const transport::StreamFailure& failure) noexcept override;
  bool isAborted() const { return failure().has_value(); }

 private:
  struct State {
    std::mutex mutex;  ///< guards all but `inside`
    std::condition_variable changed;
    std::optional<transport::StreamFailure> failure;
    bool is_connected = false;
    int64_t num_bytes = 0;    ///< by how much the device's free memory fell while it was connected
    std::timed_mutex inside;  ///< held by the line's thread while it calls the backend, from the begin of a group to its end
  };
  /// Lets the line's thread into the backend; abort() waits until the lock is released. The lock is not held where the transport is aborted.
  std::unique_lock<std::timed_mutex> enter() const;
  static void abortBackend(::c10d::Backend& backend, State& state) noexcept;
  std::optional<transport::StreamFailure> failure() const;
  void message(const std::function<c10::intrusive_ptr<::c10d::Work>()>& enqueue);
  at::Tensor bytesAt(void* data, int64_t num_bytes) const;

  c10::intrusive_ptr<::c10d::Backend> backend_;
  const std::shared_ptr<DeviceLine> line_;
  const std::shared_ptr<CommunicatorThreads> threads_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();  ///< what is told of an end may outlive the transport
  std::set<int32_t> sends_to_;                                      ///< connected; the line's thread
  std::set<int32_t> receives_from_;
  std::unique_lock<std::timed_mutex> group_;  ///< held in a group; NCCL counts open groups per thread, so each that is opened is closed
};

}  // namespace xmesh::c10d_backend
