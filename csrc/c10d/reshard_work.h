#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "c10d/stream/call_on_device.h"
#include "runtime/calls/reshard_call.h"

namespace xmesh::c10d_backend {

/// A reshard in flight as a c10d::Work. wait() raises what the call failed with; result() and the future hold the destination's local tensors.
/// On a device wait() and synchronize() are as ProcessGroupNCCL's: they block until the ranks have agreed and the call is on its line's stream, and
/// make the current stream wait for it; a wait() with a timeout, or of a group whose waits block, blocks until it has ended too. Of a detached call
/// wait() is until this rank's own messages are done, synchronize() until its end, which the other ranks decide.
class ReshardWork final : public ::c10d::Work {
 public:
  /// `on_device` is null on the host.
  ReshardWork(std::shared_ptr<runtime::ReshardCall> call, std::vector<at::Tensor> dst, std::shared_ptr<CallOnDevice> on_device = nullptr,
              bool blocks = false);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  void abort() override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  const std::shared_ptr<runtime::ReshardCall>& call() const { return call_; }

 private:
  bool waitOnDevice(std::chrono::milliseconds timeout);

  std::shared_ptr<runtime::ReshardCall> call_;
  std::vector<at::Tensor> dst_;
  std::shared_ptr<CallOnDevice> on_device_;
  bool blocks_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace xmesh::c10d_backend
