// Everything of ProcessGroupXmesh that moves no tensors: sub-groups, timeouts, hooks, allocators, errors, the end.
#include <algorithm>
#include <exception>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "c10d/live_groups.h"
#include "c10d/process_group_xmesh.h"

namespace xmesh::c10d_backend {
namespace {

template <class AnyBackend>
void addTimeout(AnyBackend& backend, const std::chrono::milliseconds& timeout) {
  if constexpr (requires { backend.addEphemeralTimeout(timeout); }) {
    backend.addEphemeralTimeout(timeout);
  }
}

template <class AnyBackend>
void startEstimate(AnyBackend& backend) {
  if constexpr (requires { backend.startTimeEstimate(); }) {
    backend.startTimeEstimate();
  }
}

template <class AnyBackend>
float endEstimate(AnyBackend& backend) {
  if constexpr (requires { backend.endTimeEstimate(); }) {
    return backend.endTimeEstimate();
  } else {
    return 0;
  }
}

c10::intrusive_ptr<XmeshOptions> childOptions(const XmeshOptions& parent, const c10::intrusive_ptr<::c10d::Backend::Options>& given) {
  const auto* own = dynamic_cast<const XmeshOptions*>(given.get());
  auto options = c10::make_intrusive<XmeshOptions>(own != nullptr ? *own : parent);
  if (given) {
    options->timeout = given->timeout;
    options->group_name = given->group_name;
    options->group_desc = given->group_desc;
  }
  return options;
}

}  // namespace

c10::intrusive_ptr<::c10d::Backend> ProcessGroupXmesh::split(const c10::intrusive_ptr<::c10d::Store>& store, const std::vector<int>& ranks,
                                                             const c10::intrusive_ptr<::c10d::Backend::Options>& opts) {
  const auto found = std::find(ranks.begin(), ranks.end(), getRank());
  if (found == ranks.end()) {
    return nullptr;
  }
  auto options = childOptions(*options_, opts);
  std::string name = options->group_name;
  for (const int rank : ranks) {
    name += "," + std::to_string(rank);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (name == last_split_name_) {
      if (auto made = last_split_.lock()) {
        return made;
      }
    }
  }
  options->global_ranks_in_group.clear();
  for (const int rank : ranks) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < getSize(), "xmesh: split: rank ", rank, " is not in a group of ", getSize(), " ranks");
    options->global_ranks_in_group.push_back(globalRanks().empty() ? static_cast<uint64_t>(rank) : globalRanks()[rank]);
  }
  auto child_store = c10::make_intrusive<::c10d::PrefixStore>("xmesh_split/" + name, store->clone());
  auto child = noteLive(c10::make_intrusive<ProcessGroupXmesh>(std::move(child_store), static_cast<int>(found - ranks.begin()),
                                                               static_cast<int>(ranks.size()), std::move(options), inner_.hooks()));
  const std::lock_guard<std::mutex> lock(mutex_);
  last_split_name_ = std::move(name);
  last_split_ = c10::weak_intrusive_ptr<::c10d::Backend>(c10::intrusive_ptr<::c10d::Backend>(child));
  return child;
}

c10::intrusive_ptr<::c10d::Backend> ProcessGroupXmesh::merge(const c10::intrusive_ptr<::c10d::Store>& store,
                                                             const c10::intrusive_ptr<::c10d::Backend::Options>& opts, const int& rank,
                                                             const int& size) {
  auto options = childOptions(*options_, opts);
  options->global_ranks_in_group.clear();
  auto child_store = c10::make_intrusive<::c10d::PrefixStore>("xmesh_merge/" + options->group_name, store->clone());
  return noteLive(c10::make_intrusive<ProcessGroupXmesh>(std::move(child_store), rank, size, std::move(options), inner_.hooks()));
}

void ProcessGroupXmesh::setSequenceNumberForGroup() {
  inner_.forEach([](::c10d::Backend& made) { made.setSequenceNumberForGroup(); });
}

uint64_t ProcessGroupXmesh::getSequenceNumberForGroup() {
  uint64_t number = 0;
  inner_.forEach([&](::c10d::Backend& made) { number += made.getSequenceNumberForGroup(); });
  return number;
}

void ProcessGroupXmesh::registerOnCompletionHook(std::function<void(std::shared_ptr<::c10d::WorkInfo>)>&& hook) {
  forwardPrimary([&](::c10d::Backend& backend) { backend.registerOnCompletionHook(std::function(hook)); });
  onCompletionHook_ = std::move(hook);
}

void ProcessGroupXmesh::waitForPendingWorks() {
  forwardPrimary([](::c10d::Backend& backend) { backend.waitForPendingWorks(); });
}

void ProcessGroupXmesh::enableCollectivesTiming() {
  inner_.forEach([](::c10d::Backend& made) { made.enableCollectivesTiming(); });
}

void ProcessGroupXmesh::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  inner_.forEach([&](::c10d::Backend& made) { made.setGroupUid(uid); });
}

void ProcessGroupXmesh::eagerConnectSingleDevice(at::Device device) { inner(device.type()).eagerConnectSingleDevice(device); }

::c10d::ErrorType ProcessGroupXmesh::getError() {
  auto first = ::c10d::ErrorType::SUCCESS;
  inner_.forEach([&](::c10d::Backend& made) {
    if (first == ::c10d::ErrorType::SUCCESS) {
      first = made.getError();
    }
  });
  return first;
}

bool ProcessGroupXmesh::supportsTimeEstimation() const { return inner_.primary() != c10::DeviceType::CPU && primary().supportsTimeEstimation(); }

std::shared_ptr<c10::Allocator> ProcessGroupXmesh::getMemAllocator() {
  std::shared_ptr<c10::Allocator> allocator;
  forwardPrimary([&](::c10d::Backend& backend) { allocator = backend.getMemAllocator(); });
  return allocator;
}

at::Tensor ProcessGroupXmesh::allocateTensor(long size, at::TensorOptions options) {  // NOLINT(google-runtime-int): c10d's signature
  at::Tensor tensor;
  forwardPrimary([&](::c10d::Backend& backend) { tensor = backend.allocateTensor(size, options); });
  return tensor;
}

bool ProcessGroupXmesh::supportsTensorAlloc(c10::DeviceIndex device) {
  return inner_.primary() != c10::DeviceType::CPU && device >= 0 && primary().supportsTensorAlloc(device);
}

void ProcessGroupXmesh::abort() {
  inner_.hooks().run_unlocked([this] { faults_->abort(); });  // first: close() says that this rank has left
  close(/*abort=*/true);
  inner_.forEach([](::c10d::Backend& made) { made.abort(); });
}

void ProcessGroupXmesh::endCollectives(runtime::Failure failure) noexcept {
  faults_->end(std::move(failure));
  has_ended_ = true;
  abortAccelerators();
}

void ProcessGroupXmesh::abortAccelerators() noexcept {
  if (!fork_.isHere() || !inner_.hasAccelerators()) {
    return;
  }
  try {
    // An abort may wait for the device.
    std::thread([self = c10::intrusive_ptr<ProcessGroupXmesh>::unsafe_reclaim_from_nonowning(this)] { self->inner_.abortAccelerators(); }).detach();
  } catch (const std::exception&) {
    return;  // no thread: they end with the group's timeout
  }
}

void ProcessGroupXmesh::shutdown() {
  close(/*abort=*/false);
  inner_.forEach([](::c10d::Backend& made) { made.shutdown(); });
}

void ProcessGroupXmesh::closeBeforeExit(bool has_failed) noexcept {
  if (fork_.isHere()) {
    closeReshards(/*abort=*/has_failed);
  }
}

void ProcessGroupXmesh::leaveBeforeExit(bool has_failed) noexcept { faults_->leave(/*in_order=*/!has_failed && faults_->openCalls().empty()); }

std::future<void> ProcessGroupXmesh::endGloo() noexcept { return fork_.isHere() ? inner_.endGloo() : std::future<void>(); }

void ProcessGroupXmesh::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  inner_.forEach([&](::c10d::Backend& made) { addTimeout(made, timeout); });
}

void ProcessGroupXmesh::startTimeEstimate() {
  forwardPrimary([](::c10d::Backend& backend) { startEstimate(backend); });
}

float ProcessGroupXmesh::endTimeEstimate() {
  float microseconds = 0;
  forwardPrimary([&](::c10d::Backend& backend) { microseconds = endEstimate(backend); });
  return microseconds;
}

#ifdef C10D_BACKEND_HAS_WINDOW
bool ProcessGroupXmesh::supportsWindow() const { return primary().supportsWindow(); }

c10::intrusive_ptr<::c10d::Window> ProcessGroupXmesh::new_window(const std::optional<at::Tensor>& tensor) {
  return (tensor ? inner(tensor->device().type()) : primary()).new_window(tensor);
}
#endif

#ifdef C10D_BACKEND_HAS_HOOKS
bool ProcessGroupXmesh::supportsAbortHooks() const { return primary().supportsAbortHooks(); }

void ProcessGroupXmesh::registerAbortHook(int64_t hook_id, ::c10d::AbortHook hook) {
  forwardPrimary([&](::c10d::Backend& backend) { backend.registerAbortHook(hook_id, hook); });
}

void ProcessGroupXmesh::unregisterAbortHook(int64_t hook_id) {
  forwardPrimary([&](::c10d::Backend& backend) { backend.unregisterAbortHook(hook_id); });
}
#endif

}  // namespace xmesh::c10d_backend
