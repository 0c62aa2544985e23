#include "c10d/process_group_xmesh.h"

#include <algorithm>
#include <numeric>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "c10d/call_watch.h"
#include "c10d/coalesced_work.h"
#include "c10d/life_lines.h"

namespace xmesh::c10d_backend {
namespace {

constexpr auto kCpu = c10::DeviceType::CPU;

/// Finds the one device kind of a call's tensors; cpu for a call without any.
class KindOf {
 public:
  explicit KindOf(const char* operation) : operation_(operation) {}
  void operator()(const at::Tensor& tensor) {
    const auto kind = tensor.device().type();
    if (!is_known_) {
      kind_ = kind;
      is_known_ = true;
    }
    TORCH_CHECK_VALUE(kind == kind_, "xmesh: ", operation_, " got tensors on ", c10::DeviceTypeName(kind_, true), " and on ",
                      c10::DeviceTypeName(kind, true), "; expected the tensors of one call on one kind of device");
  }
  void operator()(const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) {
      (*this)(tensor);
    }
  }
  void operator()(const std::vector<std::vector<at::Tensor>>& lists) {
    for (const auto& tensors : lists) {
      (*this)(tensors);
    }
  }
  c10::DeviceType kind() const { return kind_; }

 private:
  const char* operation_;
  c10::DeviceType kind_ = kCpu;
  bool is_known_ = false;
};

/// That of the tensors, lists and lists of lists of one call.
template <class... Tensors>
c10::DeviceType kindOf(const char* operation, const Tensors&... tensors) {
  KindOf found(operation);
  (found(tensors), ...);
  return found.kind();
}

/// c10d's refusals name the backend that lacks something: the user asked xmesh.
[[noreturn]] void rethrowAsXmesh(const c10::Error& error, const std::string& inner_name) {
  const std::string& message = error.msg();
  for (const char* const before : {"Backend ", "got "}) {
    const std::string named = before + inner_name + " ";
    const auto at = message.find(named);
    if (at != std::string::npos) {
      throw c10::Error(message.substr(0, at) + before + "xmesh " + message.substr(at + named.size()), error.backtrace());
    }
  }
  throw;
}

std::vector<int64_t> globalRanksOf(const XmeshOptions& options, int size) {
  std::vector<int64_t> out(options.global_ranks_in_group.begin(), options.global_ranks_in_group.end());
  if (out.empty()) {
    out.resize(static_cast<size_t>(size));
    std::iota(out.begin(), out.end(), 0);
  }
  return out;
}

}  // namespace

ProcessGroupXmesh::ProcessGroupXmesh(c10::intrusive_ptr<::c10d::Store> store, int rank, int size, c10::intrusive_ptr<XmeshOptions> options,
                                     HostHooks hooks)
    : Backend(rank, size),
      options_(std::move(options)),
      inner_(std::move(hooks), std::move(store), rank, size, options_),
      faults_(std::make_shared<CollectiveFaults>(rank, globalRanksOf(*options_, size), publishLifeLine(inner_.store(), rank),
                                                 [connections = inner_.glooConnections()] { connections->breakOff(); })),
      last_split_(c10::intrusive_ptr<::c10d::Backend>()) {
  init();
  inner(kCpu);
  faults_->meet(inner_.store());
  watchCalls(faults_);
}

ProcessGroupXmesh::~ProcessGroupXmesh() { end(); }

void ProcessGroupXmesh::end() noexcept {
  if (!fork_.isHere()) {
    inner_.leak();
    attachment_.leak();
    return;
  }
  close(/*abort=*/false);
  if (faults_->mayHaveLostCalls()) {
    inner_.endGloo();  // whose end would wait for calls that nobody else waits for
  }
  inner_.end();
}

void ProcessGroupXmesh::release_resources() {
  end();
  inner_.dropStore();
}

void ProcessGroupXmesh::closeReshards(bool abort) noexcept {
  std::shared_ptr<GroupAttachment> attachment = attachment_.close();
  if (attachment) {
    inner_.hooks().run_unlocked([&] {
      attachment->close(abort);
      attachment.reset();
    });
  }
}

void ProcessGroupXmesh::close(bool abort) noexcept {
  closeReshards(abort);
  faults_->leave(/*in_order=*/!abort);
}

::c10d::Backend& ProcessGroupXmesh::inner(c10::DeviceType kind) const {
  fork_.check();
  if (::c10d::Backend* backend = inner_.made(kind)) {
    return *backend;
  }
  return inner_.get(kind, [this, kind](::c10d::Backend& made) {
    made.setGroupUid(getGroupUid());
    made.setGroupDesc(getGroupDesc());
    if (bound_device_id_ && bound_device_id_->type() == kind) {
      made.setBoundDeviceId(bound_device_id_);
    }
  });
}

::c10d::Backend& ProcessGroupXmesh::primary() const { return inner(inner_.primary()); }

c10::intrusive_ptr<::c10d::Backend> ProcessGroupXmesh::innerBackend(c10::DeviceType kind) {
  return c10::intrusive_ptr<::c10d::Backend>::unsafe_reclaim_from_nonowning(&inner(kind));
}

template <class Call>
auto ProcessGroupXmesh::forward(c10::DeviceType kind, Call&& call) const {
  const InnerBackends::Inside inside = inner_.inside();
  ::c10d::Backend& backend = inner(kind);
  try {
    return call(backend);
  } catch (const c10::Error& error) {
    rethrowAsXmesh(error, backend.getBackendName());
  }
}

void ProcessGroupXmesh::forwardPrimary(const std::function<void(::c10d::Backend&)>& call) const { forward(inner_.primary(), call); }

ProcessGroupXmesh::Work ProcessGroupXmesh::collect(c10::DeviceType kind, Work work) {
  if (is_coalescing_ && work && (kind == kCpu || kind != inner_.primary())) {
    coalesced_.push_back(work);
  }
  return work;
}

void ProcessGroupXmesh::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  inner_.forEach([&](::c10d::Backend& made) { made.setTimeout(timeout); });
}

template <class Call>
ProcessGroupXmesh::Work ProcessGroupXmesh::run(GuardedCall what, c10::DeviceType kind, Call&& call) {
  fork_.check();
  if (kind == kCpu || has_ended_) {
    faults_->check(what.what);
  }
  Work work = forward(kind, call);
  if (kind != kCpu && has_ended_) {  // meanwhile: its backend may be younger than the abort
    abortAccelerators();
    faults_->check(what.what);
  }
  if (kind == kCpu && work) {
    work = c10::make_intrusive<GuardedWork>(std::move(work), faults_, std::move(what));
  }
  return collect(kind, std::move(work));
}

#define XMESH_FORWARD(what, call_expression, ...) \
  return run({what}, kindOf(what, __VA_ARGS__), [&](::c10d::Backend& backend) { return backend.call_expression; })

ProcessGroupXmesh::Work ProcessGroupXmesh::broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) {
  XMESH_FORWARD("broadcast", broadcast(tensors, opts), tensors);
}

ProcessGroupXmesh::Work ProcessGroupXmesh::allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  XMESH_FORWARD("all_reduce", allreduce(tensors, opts), tensors);
}

ProcessGroupXmesh::Work ProcessGroupXmesh::allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  XMESH_FORWARD("all_reduce (sparse)", allreduce_sparse(tensors, opts), tensors);
}

ProcessGroupXmesh::Work ProcessGroupXmesh::allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& opts) {
  XMESH_FORWARD("all_reduce_coalesced", allreduce_coalesced(tensors, opts), tensors);
}

ProcessGroupXmesh::Work ProcessGroupXmesh::reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) {
  XMESH_FORWARD("reduce", reduce(tensors, opts), tensors);
}

ProcessGroupXmesh::Work ProcessGroupXmesh::allgather(TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) {
  XMESH_FORWARD("all_gather", allgather(outputs, inputs, opts), inputs, outputs);
}

ProcessGroupXmesh::Work ProcessGroupXmesh::_allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& opts) {
  XMESH_FORWARD("all_gather_into_tensor", _allgather_base(output, input, opts), input, output);
}

ProcessGroupXmesh::Work ProcessGroupXmesh::allgather_coalesced(TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) {
  XMESH_FORWARD("all_gather_coalesced", allgather_coalesced(outputs, inputs, opts), inputs, outputs);
}

ProcessGroupXmesh::Work ProcessGroupXmesh::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) {
  XMESH_FORWARD("all_gather_into_tensor_coalesced", allgather_into_tensor_coalesced(outputs, inputs, opts), inputs, outputs);
}

ProcessGroupXmesh::Work ProcessGroupXmesh::gather(TensorLists& outputs, Tensors& inputs, const ::c10d::GatherOptions& opts) {
  XMESH_FORWARD("gather", gather(outputs, inputs, opts), inputs, outputs);
}

ProcessGroupXmesh::Work ProcessGroupXmesh::scatter(Tensors& outputs, TensorLists& inputs, const ::c10d::ScatterOptions& opts) {
  XMESH_FORWARD("scatter", scatter(outputs, inputs, opts), outputs, inputs);
}

ProcessGroupXmesh::Work ProcessGroupXmesh::reduce_scatter(Tensors& outputs, TensorLists& inputs, const ::c10d::ReduceScatterOptions& opts) {
  XMESH_FORWARD("reduce_scatter", reduce_scatter(outputs, inputs, opts), outputs, inputs);
}

ProcessGroupXmesh::Work ProcessGroupXmesh::_reduce_scatter_base(at::Tensor& output, at::Tensor& input, const ::c10d::ReduceScatterOptions& opts) {
  XMESH_FORWARD("reduce_scatter_tensor", _reduce_scatter_base(output, input, opts), output, input);
}

ProcessGroupXmesh::Work ProcessGroupXmesh::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                           const ::c10d::ReduceScatterOptions& opts) {
  XMESH_FORWARD("reduce_scatter_tensor_coalesced", reduce_scatter_tensor_coalesced(outputs, inputs, opts), outputs, inputs);
}

ProcessGroupXmesh::Work ProcessGroupXmesh::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                                         std::vector<int64_t>& input_splits, const ::c10d::AllToAllOptions& opts) {
  XMESH_FORWARD("all_to_all_single", alltoall_base(output, input, output_splits, input_splits, opts), output, input);
}

ProcessGroupXmesh::Work ProcessGroupXmesh::alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& opts) {
  XMESH_FORWARD("all_to_all", alltoall(outputs, inputs, opts), outputs, inputs);
}

ProcessGroupXmesh::Work ProcessGroupXmesh::send(Tensors& tensors, int dst_rank, int tag) {
  return run({"send to rank " + std::to_string(dst_rank), dst_rank, false, true}, kindOf("send", tensors),
             [&](::c10d::Backend& backend) { return backend.send(tensors, dst_rank, tag); });
}

ProcessGroupXmesh::Work ProcessGroupXmesh::recv(Tensors& tensors, int src_rank, int tag) {
  return run({"recv from rank " + std::to_string(src_rank), src_rank, false}, kindOf("recv", tensors),
             [&](::c10d::Backend& backend) { return backend.recv(tensors, src_rank, tag); });
}

ProcessGroupXmesh::Work ProcessGroupXmesh::recvAnysource(Tensors& tensors, int tag) {
  return run({"recv from any source", -1, false}, kindOf("recv from any source", tensors),
             [&](::c10d::Backend& backend) { return backend.recvAnysource(tensors, tag); });
}

ProcessGroupXmesh::Work ProcessGroupXmesh::barrier(const ::c10d::BarrierOptions& opts) {
  const c10::DeviceType asked = opts.device ? opts.device->type() : opts.device_ids.empty() ? kCpu : inner_.primary();
  return run({"barrier"}, inner_.canMake(asked) ? asked : kCpu, [&](::c10d::Backend& backend) { return backend.barrier(opts); });
}

namespace {
/// As ProcessGroup's call of this name, on whichever c10d this is built against.
template <class AnyBackend>
c10::intrusive_ptr<::c10d::Work> gatherIntoTensor(AnyBackend& backend, at::Tensor& output, at::Tensor& input, const ::c10d::GatherOptions& opts) {
  if constexpr (requires { backend.gather_into_tensor(output, input, opts); }) {
    return backend.gather_into_tensor(output, input, opts);
  } else {
    TORCH_CHECK(false, "Backend ", backend.getBackendName(), " does not support gather_into_tensor");
  }
}
}  // namespace

ProcessGroupXmesh::Work ProcessGroupXmesh::gather_into_tensor(at::Tensor& output, at::Tensor& input, const ::c10d::GatherOptions& opts) {
  return run({"gather_into_tensor"}, kindOf("gather_into_tensor", input),
             [&](::c10d::Backend& backend) { return gatherIntoTensor(backend, output, input, opts); });
}

#undef XMESH_FORWARD

void ProcessGroupXmesh::monitoredBarrier(const ::c10d::BarrierOptions& opts, bool wait_all_ranks) {
  faults_->check("monitored_barrier");
  std::exception_ptr error;
  try {
    return forward(kCpu, [&](::c10d::Backend& backend) { backend.monitoredBarrier(opts, wait_all_ranks); });
  } catch (...) {
    error = std::current_exception();
  }
  faults_->collectiveFailed(error);
  std::rethrow_exception(faults_->explained(error, "monitored_barrier", -1));
}

bool ProcessGroupXmesh::supportsCoalescing() const { return inner_.primary() != kCpu && primary().supportsCoalescing(); }

void ProcessGroupXmesh::startCoalescing() {
  forward(primary().supportsCoalescing() ? inner_.primary() : kCpu, [](::c10d::Backend& backend) { backend.startCoalescing(); });
  is_coalescing_ = true;
}

ProcessGroupXmesh::Work ProcessGroupXmesh::endCoalescing() {
  is_coalescing_ = false;
  auto parts = std::exchange(coalesced_, {});
  if (Work work =
          forward(primary().supportsCoalescing() ? inner_.primary() : kCpu, [](::c10d::Backend& backend) { return backend.endCoalescing(); })) {
    parts.push_back(std::move(work));
  }
  if (parts.size() <= 1) {
    return parts.empty() ? nullptr : parts.front();
  }
  return c10::make_intrusive<CoalescedWork>(std::move(parts));
}

}  // namespace xmesh::c10d_backend
