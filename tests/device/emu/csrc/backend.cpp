#include "backend.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <utility>

#include "message_tensors.h"
#include "ops.h"

namespace emu {
namespace {

using at::Tensor;
using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr std::chrono::seconds kShutdownPatience{5};
constexpr std::chrono::seconds kAbortPatience{60};

thread_local bool has_open_group = false;  // NCCL counts its open groups per thread

Members allMembers(int rank, int size) {
  Members members;
  for (int other = 0; other < size; ++other) members.group_ranks.push_back(other);
  members.own = rank;
  return members;
}

}  // namespace

EmuWork::EmuWork(int rank, OpType type, Parts parts) : Work(rank, type), parts_(std::move(parts)) {}

void EmuWork::dropTensors() {
  std::vector<Tensor> dropped;  // goes after the lock
  std::lock_guard lock(tensors_mutex_);
  dropped.swap(parts_.tensors);
}

std::vector<Tensor> EmuWork::result() {
  std::lock_guard lock(tensors_mutex_);
  return parts_.tensors;
}

bool EmuWork::isCompleted() {
  if (!parts_.end->isDone() && !parts_.outcome->exception()) return false;
  dropTensors();
  return true;
}

bool EmuWork::isSuccess() const { return parts_.end->isDone() && !parts_.outcome->exception(); }

std::exception_ptr EmuWork::exception() const { return parts_.outcome->exception(); }

void EmuWork::synchronize() {
  currentWorker(parts_.device).block(parts_.end);
  dropTensors();
}

bool EmuWork::wait(std::chrono::milliseconds timeout) {
  const bool has_timeout = timeout.count() > 0;
  if (has_timeout || parts_.blocks_host) {
    const auto patience = has_timeout ? timeout : parts_.timeout;
    if (!parts_.end->wait(nullptr, Clock::now() + patience) && !isStopping()) {
      parts_.outcome->fail("emunccl: " + c10d::opTypeToString(opType_) + " timed out after " + std::to_string(patience.count()) + " ms on rank " +
                           std::to_string(rank_));
      *parts_.aborted = true;
    }
    if (const auto error = exception()) std::rethrow_exception(error);
  }
  synchronize();
  return true;
}

void EmuWork::abort() { *parts_.aborted = true; }

c10::intrusive_ptr<c10::ivalue::Future> EmuWork::getFuture() {
  std::lock_guard lock(tensors_mutex_);
  if (future_ == nullptr) {
    const c10::Device device(kDeviceType, parts_.device);
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    // The future takes its events from the current stream: one that comes to nothing but the end of this work.
    auto& worker = newWorker(parts_.device);
    worker.block(parts_.end);
    {
      const c10::StreamGuard guard(worker.stream());
      future_->markCompleted(c10::IValue(parts_.tensors));
    }
    worker.retire();
  }
  return future_;
}

EmuNccl::EmuNccl(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout)
    : Backend(rank, size), store_(std::move(store)), options_(c10::make_intrusive<Options>("emunccl", timeout)) {
  init();
}

EmuNccl::~EmuNccl() { *aborted_ = true; }

bool EmuNccl::isCoalescing() {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(!coalescing_ || coalescing_->thread == std::this_thread::get_id(),
              "emunccl: an operation from another thread between startCoalescing and endCoalescing");
  return coalescing_.has_value();
}

void EmuNccl::startCoalescing() {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(!coalescing_, "emunccl: startCoalescing was called twice without endCoalescing");
  TORCH_CHECK(!has_open_group, "emunccl: startCoalescing while this thread has not ended a group of another backend");
  has_open_group = true;
  coalescing_.emplace();
  coalescing_->thread = std::this_thread::get_id();
}

WorkPtr EmuNccl::endCoalescing() {
  TORCH_CHECK(isCoalescing(), "emunccl: endCoalescing was called without startCoalescing");
  has_open_group = false;
  std::optional<Coalescing> ended;
  {
    std::lock_guard lock(mutex_);
    ended.swap(coalescing_);
  }
  if (ended->is_empty) return nullptr;
  return run(std::move(ended->operation));
}

WorkPtr EmuNccl::run(Operation operation) {
  if (isCoalescing()) {
    std::lock_guard lock(mutex_);
    auto& whole = coalescing_->operation;
    TORCH_CHECK(coalescing_->is_empty || (whole.device == operation.device && whole.is_async == operation.is_async),
                "emunccl: operations of one group must be on one device, and all asynchronous or none");
    auto move_all = [](auto& from, auto& to) { std::move(from.begin(), from.end(), std::back_inserter(to)); };
    move_all(operation.group.transfers, whole.group.transfers);
    move_all(operation.group.finishers, whole.group.finishers);
    move_all(operation.tensors, whole.tensors);
    whole.device = operation.device;
    whole.is_async = operation.is_async;
    coalescing_->is_empty = false;
    return nullptr;
  }
  const auto communicator = communicatorOfAll(operation.device);
  return enqueue(*communicator, std::move(operation));
}

WorkPtr EmuNccl::enqueue(Communicator& communicator, Operation operation) {
  TORCH_CHECK_WITH(DistBackendError, !*aborted_, "emunccl: this backend has been aborted, or one of its operations has failed");
  ++num_operations_;
  auto outcome = std::make_shared<Outcome>();
  auto end = communicator.enqueue(std::move(operation.group), outcome, operation.is_async);
  {
    std::lock_guard lock(mutex_);
    unfinished_.erase(std::remove_if(unfinished_.begin(), unfinished_.end(), [](const auto& one) { return one->isDone(); }), unfinished_.end());
    unfinished_.push_back(end);
  }
  if (!operation.is_async) return nullptr;
  std::vector<Tensor> kept;
  for (const auto& tensor : operation.tensors) kept.push_back(detached(tensor));
  return c10::make_intrusive<EmuWork>(rank_, operation.type,
                                      EmuWork::Parts{std::move(end), std::move(outcome), aborted_, std::move(kept), communicator.device(),
                                                     operation.type == OpType::BARRIER, options_->timeout});
}

std::shared_ptr<Communicator> EmuNccl::communicatorOf(const Members& members, const std::string& key, c10::DeviceIndex device) {
  TORCH_CHECK_WITH(DistBackendError, !*aborted_, "emunccl: this backend has been aborted, or one of its operations has failed");
  std::lock_guard making(making_mutex_);
  {
    std::lock_guard lock(mutex_);
    const auto found = communicators_.find(key);
    if (found != communicators_.end()) {
      TORCH_CHECK(found->second->device() == device, "emunccl: a rank's tensors must be on one device, but are on emu:", int(found->second->device()),
                  " and emu:", int(device));
      return found->second;
    }
  }
  auto made = std::make_shared<Communicator>(*store_, Communicator::Options{"emunccl/" + key, members, device, options_->timeout}, aborted_);
  std::lock_guard lock(mutex_);
  return communicators_[key] = std::move(made);
}

std::shared_ptr<Communicator> EmuNccl::communicatorOfAll(c10::DeviceIndex device) { return communicatorOf(allMembers(rank_, size_), "all", device); }

WorkPtr EmuNccl::pointToPoint(std::vector<Tensor>& tensors, int peer, bool is_send) {
  const char* what = is_send ? "send" : "recv";
  const auto& tensor = single(tensors, what);
  checkTensor(tensor, what);
  TORCH_CHECK(peer >= 0 && peer < size_, "emunccl: ", what, ": there is no rank ", peer, " among ", size_, " ranks");
  const auto device = tensor.device().index();
  Operation operation{is_send ? OpType::SEND : OpType::RECV, {}, tensors, device, true};
  Transfer transfer{MessageKind::kPointToPoint, is_send, peer, bytesOf(tensor), int64_t(tensor.nbytes())};
  if (isCoalescing() || is_eager_) {
    operation.group.transfers.push_back(transfer);
    return run(std::move(operation));
  }
  TORCH_CHECK(peer != rank_, "emunccl: rank ", rank_, " can send to itself only within a group");
  const int low = std::min(peer, rank_);
  const int high = std::max(peer, rank_);
  transfer.peer = peer == low ? 0 : 1;
  operation.group.transfers.push_back(transfer);
  const auto key = std::to_string(low) + ":" + std::to_string(high);
  const auto communicator = communicatorOf({{low, high}, rank_ == low ? 0 : 1}, key, device);
  return enqueue(*communicator, std::move(operation));
}

WorkPtr EmuNccl::send(std::vector<Tensor>& tensors, int peer, int /*tag*/) { return pointToPoint(tensors, peer, true); }
WorkPtr EmuNccl::recv(std::vector<Tensor>& tensors, int peer, int /*tag*/) { return pointToPoint(tensors, peer, false); }

WorkPtr EmuNccl::barrier(const c10d::BarrierOptions& options) {
  auto device = currentDevice();
  if (bound_device_id_) device = bound_device_id_->index();
  if (!options.device_ids.empty()) device = c10::DeviceIndex(options.device_ids[0]);
  if (options.device && options.device->has_index()) device = options.device->index();
  Operation operation{OpType::BARRIER, {}, {}, device, options.asyncOp};
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    for (const bool is_send : {true, false}) operation.group.transfers.push_back({MessageKind::kBarrier, is_send, peer, nullptr, 0});
  }
  auto work = run(std::move(operation));
  if (!options.asyncOp && !isCoalescing()) currentWorker(device).synchronize();
  return work;
}

void EmuNccl::eagerConnectSingleDevice(at::Device device) {
  is_eager_ = true;
  communicatorOfAll(device.has_index() ? device.index() : currentDevice());
}

c10d::ErrorType EmuNccl::getError() { return *aborted_ ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS; }

void EmuNccl::dropCommunicators() {
  std::map<std::string, std::shared_ptr<Communicator>> dropped;
  std::lock_guard lock(mutex_);
  dropped.swap(communicators_);
}

void EmuNccl::abort() {
  {
    std::lock_guard lock(mutex_);
    if (coalescing_.has_value()) {
      std::fprintf(stderr, "emunccl: abort() frees a communicator whose group is being enqueued\n");
      std::terminate();
    }
  }
  *aborted_ = true;
  awaitUnfinished(nullptr, kAbortPatience);
  dropCommunicators();
}

void EmuNccl::awaitUnfinished(const std::atomic<bool>* stop, std::chrono::milliseconds patience) {
  std::vector<RecordingPtr> unfinished;
  {
    std::lock_guard lock(mutex_);
    unfinished.swap(unfinished_);
  }
  const auto deadline = Clock::now() + patience;
  for (const auto& end : unfinished) end->wait(stop, deadline);
}

void EmuNccl::shutdown() {
  awaitUnfinished(aborted_.get(), std::min<std::chrono::milliseconds>(options_->timeout, kShutdownPatience));
  abort();
}

}  // namespace emu
