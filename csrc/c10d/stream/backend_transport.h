#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d/stream/device_line.h"
#include "transport/stream_transport.h"

namespace xmesh::c10d_backend {

/// A StreamTransport on a line, over any c10d backend that has grouped point-to-point calls: NCCL, XCCL and their like. Its ranks are the backend's.
/// Threading: the line's thread; abort() on any.
class BackendTransport final : public transport::StreamTransport {
 public:
  BackendTransport(c10::intrusive_ptr<::c10d::Backend> backend, std::shared_ptr<DeviceLine> line);
  ~BackendTransport() override;
  /// Before anything is enqueued; blocks until all its ranks do so. Throws what that fails with, abort() included.
  void connect();
  BackendTransport(const BackendTransport&) = delete;
  BackendTransport& operator=(const BackendTransport&) = delete;

  int64_t maxGroupMessages() const override;
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
    std::mutex mutex;
    std::optional<transport::StreamFailure> failure;
  };
  std::optional<transport::StreamFailure> failure() const;
  void orderAlone(const c10::intrusive_ptr<::c10d::Work>& work) const;
  at::Tensor bytesAt(void* data, int64_t num_bytes) const;

  const c10::intrusive_ptr<::c10d::Backend> backend_;
  const std::shared_ptr<DeviceLine> line_;
  int64_t num_bytes_ = 0;       ///< of the device's memory, that it was seen to take
  std::set<int32_t> sends_to_;  ///< connected; the line's thread
  std::set<int32_t> receives_from_;
  bool is_group_open_ = false;  ///< the line's thread; NCCL counts open groups per thread, so each that is opened is closed, whatever happens
  const std::shared_ptr<State> state_ = std::make_shared<State>();  ///< what is told of an end may outlive the transport
};

}  // namespace xmesh::c10d_backend
