// The c10d backend "emunccl": NCCL's semantics between processes of one machine, on tensors of the emulated device.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "communicator.h"

namespace emu {

// What NCCL calls a work. It keeps the tensors until it has been waited for, is known to be done, or is dropped.
class EmuWork final : public c10d::Work {
 public:
  struct Parts {
    RecordingPtr end;
    std::shared_ptr<Outcome> outcome;
    std::shared_ptr<std::atomic<bool>> aborted;
    std::vector<at::Tensor> tensors;
    c10::DeviceIndex device = 0;
    bool blocks_host = false;
    std::chrono::milliseconds timeout{0};
  };
  EmuWork(int rank, c10d::OpType type, Parts parts);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  // Makes the current stream wait. With a timeout it blocks the host; a timeout that passes aborts the backend.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  void abort() override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void dropTensors();

  mutable std::mutex tensors_mutex_;
  Parts parts_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Thread-safe, but for coalescing: one thread issues all operations between startCoalescing() and endCoalescing().
// abort() may be called at any time. Communicators are made by the first operation that needs one, or by eagerConnectSingleDevice().
class EmuNccl final : public c10d::Backend {
 public:
  EmuNccl(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout);
  ~EmuNccl() override;

  const std::string getBackendName() const override { return "emunccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                                                 const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                               std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;
  void eagerConnectSingleDevice(at::Device device) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return num_operations_; }
  c10d::ErrorType getError() override;
  // Ends every operation that waits; their works carry an exception. The backend takes no more operations. As NCCL's, it blocks until the device
  // has passed what is enqueued, ends no making of a communicator, and ends the process where another thread is inside of a group.
  void abort() override;
  // Waits for a few seconds, or up to the timeout if that is less, for what has been enqueued, then lets go of the communicators.
  void shutdown() override;

 private:
  struct Operation {
    c10d::OpType type;
    Group group;
    std::vector<at::Tensor> tensors;
    c10::DeviceIndex device = 0;
    bool is_async = true;
  };
  struct Coalescing {
    std::thread::id thread;
    Operation operation{c10d::OpType::COALESCED, {}, {}, 0, true};
    bool is_empty = true;
  };

  c10::intrusive_ptr<c10d::Work> pointToPoint(std::vector<at::Tensor>& tensors, int peer, bool is_send);
  c10::intrusive_ptr<c10d::Work> gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, bool is_async);
  c10::intrusive_ptr<c10d::Work> scatterSums(const at::Tensor& output, const std::vector<at::Tensor>& inputs, c10d::ReduceOp::RedOpType type,
                                             bool is_async);
  c10::intrusive_ptr<c10d::Work> exchange(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs, bool is_async);
  // Enqueues the operation on the communicator of all ranks, or adds it to the group that is being coalesced.
  c10::intrusive_ptr<c10d::Work> run(Operation operation);
  c10::intrusive_ptr<c10d::Work> enqueue(Communicator& communicator, Operation operation);
  bool isCoalescing();
  std::shared_ptr<Communicator> communicatorOf(const Members& members, const std::string& key, c10::DeviceIndex device);
  std::shared_ptr<Communicator> communicatorOfAll(c10::DeviceIndex device);
  void dropCommunicators();
  void awaitUnfinished(const std::atomic<bool>* stop, std::chrono::milliseconds patience);

  const c10::intrusive_ptr<c10d::Store> store_;
  const c10::intrusive_ptr<Options> options_;
  const std::shared_ptr<std::atomic<bool>> aborted_ = std::make_shared<std::atomic<bool>>(false);
  std::atomic<uint64_t> num_operations_{0};
  std::atomic<bool> is_eager_{false};
  std::mutex making_mutex_;  // held while a communicator is made, so abort() must not need it
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Communicator>> communicators_;
  std::vector<RecordingPtr> unfinished_;
  std::optional<Coalescing> coalescing_;
};

}  // namespace emu
