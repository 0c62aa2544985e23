#pragma once

#include <atomic>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "c10d/attachment_slot.h"
#include "c10d/collective_faults.h"
#include "c10d/guarded_work.h"
#include "c10d/inner_backends.h"
#include "runtime/fork_mark.h"

namespace xmesh::c10d_backend {

/// The c10d backend "xmesh". Collectives and point-to-point calls go to the inner backend of their tensors' device kind and come back with its Work,
/// results and errors; what the inner backend lacks is refused in xmesh's name.
///
/// gloo (cpu) is made with the group, because making it is a rendezvous of all ranks and the first call may concern only two of them; an
/// accelerator's (NCCL), whose making involves no peer, at the first of its tensors. A rank's death ends gloo's collectives on all others: see
/// CollectiveFaults.
///
/// Threading: as every c10d backend, calls of one group in one order on every rank; any thread. Ownership: owns the inner backends and the
/// attachment. The destructor closes the attachment first; in a forked child it touches nothing, since threads are not inherited.
class ProcessGroupXmesh final : public ::c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<::c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  ProcessGroupXmesh(c10::intrusive_ptr<::c10d::Store> store, int rank, int size, c10::intrusive_ptr<XmeshOptions> options, HostHooks hooks);
  ~ProcessGroupXmesh() override;

  /// The store of this group's own keys.
  const c10::intrusive_ptr<::c10d::Store>& store() const { return inner_.store(); }
  std::chrono::milliseconds timeout() const { return options_->timeout; }
  /// Global rank of every group rank; empty for the default group, whose ranks are the global ones.
  const std::vector<uint64_t>& globalRanks() const { return options_->global_ranks_in_group; }
  const XmeshOptions& options() const { return *options_; }
  /// True if tensors on a device of this kind can be carried on this machine.
  bool carries(const at::Device& device) const { return inner_.canMake(device.type()); }
  /// What the host language provides: for inner backends that are not the user's.
  const HostHooks& hooks() const { return inner_.hooks(); }
  /// The inner backend of a device kind, made if need be.
  c10::intrusive_ptr<::c10d::Backend> innerBackend(c10::DeviceType kind);

  /// What lives as long as this group does; closed with it.
  AttachmentSlot& attachment() { return attachment_; }
  /// Ends collectives in flight on this rank, and all later ones, with a failure that the other ranks learn elsewhere: gloo's at once; an
  /// accelerator's are aborted, so that its streams go on. Any thread; does not wait for a device.
  void endCollectives(runtime::Failure failure) noexcept;
  /// True after abort() or shutdown().
  bool isClosed() const { return attachment_.isClosed(); }

  const std::string getBackendName() const override { return "xmesh"; }  // NOLINT(readability-const-return-type): c10d's signature
  c10::intrusive_ptr<::c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;

  Work broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) override;
  Work allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  Work allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  Work allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& opts) override;
  Work reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) override;
  Work allgather(TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& opts) override;
  Work allgather_coalesced(TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) override;
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) override;
  Work gather(TensorLists& outputs, Tensors& inputs, const ::c10d::GatherOptions& opts) override;
  Work scatter(Tensors& outputs, TensorLists& inputs, const ::c10d::ScatterOptions& opts) override;
  Work reduce_scatter(Tensors& outputs, TensorLists& inputs, const ::c10d::ReduceScatterOptions& opts) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const ::c10d::ReduceScatterOptions& opts) override;
  Work reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const ::c10d::ReduceScatterOptions& opts) override;
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                     const ::c10d::AllToAllOptions& opts) override;
  Work alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& opts) override;
  Work barrier(const ::c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const ::c10d::BarrierOptions& opts, bool wait_all_ranks) override;
  Work send(Tensors& tensors, int dst_rank, int tag) override;
  Work recv(Tensors& tensors, int src_rank, int tag) override;
  Work recvAnysource(Tensors& tensors, int tag) override;

  bool supportsCoalescing() const override;
  void startCoalescing() override;
  Work endCoalescing() override;
  void setSequenceNumberForGroup() override;
  uint64_t getSequenceNumberForGroup() override;
  void registerOnCompletionHook(std::function<void(std::shared_ptr<::c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  void enableCollectivesTiming() override;

  bool supportsSplitting() const override { return true; }
  /// The group of `ranks` (group ranks of this one), or nullptr on a rank outside. c10d asks once per device kind and gets one group.
  c10::intrusive_ptr<::c10d::Backend> split(const c10::intrusive_ptr<::c10d::Store>& store, const std::vector<int>& ranks,
                                            const c10::intrusive_ptr<::c10d::Backend::Options>& opts) override;
  c10::intrusive_ptr<::c10d::Backend> merge(const c10::intrusive_ptr<::c10d::Store>& store, const c10::intrusive_ptr<::c10d::Backend::Options>& opts,
                                            const int& rank, const int& size) override;
  void setGroupUid(const std::string& uid) override;
  void eagerConnectSingleDevice(at::Device device) override;
  ::c10d::ErrorType getError() override;
  bool supportsTimeEstimation() const override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;  // NOLINT(google-runtime-int): c10d's signature
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  void abort() override;
  void shutdown() override;
  /// The last owner has gone; the object stays while weak pointers do, and must not keep the store alive, whose server holds a port.
  void release_resources() override;
  /// For the end of the process, which may come while other threads use the group: closes the attachment (after a failure without waiting for peers),
  /// and ends gloo. What is returned is ready when gloo's threads are gone. Call it without the interpreter's lock. Nothing in a forked child.
  void closeBeforeExit(bool has_failed) noexcept;
  std::future<void> endGloo() noexcept;
  /// Once gloo has had its time. Where it is still at something, to the others this rank has died.
  void leaveBeforeExit(bool has_failed) noexcept;

  // These override where c10d has them (they came after torch 2.11).
  Work gather_into_tensor(at::Tensor& output, at::Tensor& input, const ::c10d::GatherOptions& opts);
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout);
  void startTimeEstimate();
  float endTimeEstimate();
#ifdef C10D_BACKEND_HAS_WINDOW
  bool supportsWindow() const override;
  c10::intrusive_ptr<::c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;
#endif
#ifdef C10D_BACKEND_HAS_HOOKS
  bool supportsAbortHooks() const override;
  void registerAbortHook(int64_t hook_id, ::c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t hook_id) override;
#endif

 private:
  /// The inner backend of the accelerator where there is one, else of cpu: for calls without tensors.
  ::c10d::Backend& primary() const;
  ::c10d::Backend& inner(c10::DeviceType kind) const;
  /// Runs `call` on the inner backend of the kind; notes its Work if a coalesced block on another kind is open.
  template <class Call>
  auto forward(c10::DeviceType kind, Call&& call) const;
  /// As forward(), for a call that gives a Work.
  template <class Call>
  Work run(GuardedCall what, c10::DeviceType kind, Call&& call);
  /// Runs `call` on primary(), with xmesh's name in what it refuses.
  void forwardPrimary(const std::function<void(::c10d::Backend&)>& call) const;
  Work collect(c10::DeviceType kind, Work work);
  void closeReshards(bool abort) noexcept;
  void close(bool abort) noexcept;
  void end() noexcept;
  void abortAccelerators() noexcept;

  c10::intrusive_ptr<XmeshOptions> options_;
  mutable InnerBackends inner_;
  std::shared_ptr<CollectiveFaults> faults_;  ///< has the life line, by which others know that this rank is still in the group
  const runtime::ForkMark fork_;
  std::atomic<bool> has_ended_ = false;  ///< by endCollectives()
  bool is_coalescing_ = false;           // startCoalescing .. endCoalescing, on one thread as c10d asks
  std::vector<Work> coalesced_;
  AttachmentSlot attachment_;
  mutable std::mutex mutex_;  // guards what follows
  std::string last_split_name_;
  c10::weak_intrusive_ptr<::c10d::Backend> last_split_;
};

}  // namespace xmesh::c10d_backend
