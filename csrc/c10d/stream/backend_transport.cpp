#include "c10d/stream/backend_transport.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "c10d/stream/communicator_use.h"

namespace xmesh::c10d_backend {
namespace {

/// The current stream goes on behind it; a call that ran on the current stream has no Work.
void order(const c10::intrusive_ptr<::c10d::Work>& work) {
  if (work) {
    work->wait();
  }
}

}  // namespace

BackendTransport::BackendTransport(c10::intrusive_ptr<::c10d::Backend> backend, std::shared_ptr<DeviceLine> line)
    : backend_(std::move(backend)), line_(std::move(line)) {
  ++communicatorUse().count;
}

void BackendTransport::connect() {
  try {
    const int64_t free_before = freeBytes(line_->device());
    backend_->setBoundDeviceId(line_->device());
    backend_->eagerConnectSingleDevice(line_->device());
    num_bytes_ = free_before < 0 ? 0 : std::max<int64_t>(0, free_before - freeBytes(line_->device()));
    communicatorUse().num_bytes += num_bytes_;
  } catch (const std::exception& error) {
    abort({error.what(), -1});
  }
  if (const std::optional<transport::StreamFailure> failed = failure()) {
    throw std::runtime_error(failed->reason);
  }
}

BackendTransport::~BackendTransport() {
  abort({"its communicator was given up", -1});
  --communicatorUse().count;
  communicatorUse().num_bytes -= num_bytes_;
}

std::optional<transport::StreamFailure> BackendTransport::failure() const {
  const std::lock_guard lock(state_->mutex);
  return state_->failure;
}

at::Tensor BackendTransport::bytesAt(void* data, int64_t num_bytes) const {
  return at::for_blob(data, {num_bytes}).options(at::TensorOptions(at::kByte).device(line_->device())).target_device(line_->device()).make_tensor();
}

/// A batch of NCCL has 8 places (NCCL_MAX_DEV_WORK_P2P_PER_BATCH). Which rounds share one depends on hosts and local ranks as NCCL sees them.
int64_t BackendTransport::maxGroupMessages() const {
  constexpr int64_t kPlaces = 8;
  return backend_->getSize() <= kPlaces ? kPlaces : 1;
}

/// By a byte on each new way, all in one group: its setup is the same on both ends of each, and so is the order of its rounds.
void BackendTransport::connectWays(std::span<const int32_t> send_to, std::span<const int32_t> receive_from) {
  const auto are_new = [](std::span<const int32_t> peers, std::set<int32_t>& known) {
    std::vector<int32_t> out;
    std::copy_if(peers.begin(), peers.end(), std::back_inserter(out), [&](int32_t peer) { return known.insert(peer).second; });
    return out;
  };
  const std::vector<int32_t> senders = are_new(receive_from, receives_from_);
  const std::vector<int32_t> receivers = are_new(send_to, sends_to_);
  if (isAborted() || (senders.empty() && receivers.empty())) {
    return;
  }
  const auto count = static_cast<int64_t>(senders.size() + receivers.size());
  const at::Tensor bytes = at::empty({count}, at::TensorOptions(at::kByte).device(line_->device()));
  auto* next = static_cast<std::byte*>(bytes.data_ptr());
  groupBegin();
  try {
    for (const int32_t peer : receivers) {
      enqueueSend(peer, next++, 1);
    }
    for (const int32_t peer : senders) {
      enqueueRecv(peer, next++, 1);
    }
  } catch (const std::exception& error) {
    abort({error.what(), -1});
    groupEnd();
    throw;
  }
  groupEnd();
}

void BackendTransport::groupBegin() {
  if (!isAborted()) {
    backend_->startCoalescing();
    is_group_open_ = true;
  }
}

void BackendTransport::groupEnd() {
  if (!std::exchange(is_group_open_, false)) {
    return;
  }
  try {
    order(backend_->endCoalescing());
  } catch (const std::exception&) {
    if (!isAborted()) {
      throw;
    }
  }
}

/// A message outside groups; those of a group are ordered at its end.
void BackendTransport::orderAlone(const c10::intrusive_ptr<::c10d::Work>& work) const {
  if (!is_group_open_) {
    order(work);
  }
}

void BackendTransport::enqueueSend(int32_t peer, const void* data, int64_t num_bytes) {
  if (!isAborted()) {
    std::vector<at::Tensor> tensors{bytesAt(const_cast<void*>(data), num_bytes)};
    orderAlone(backend_->send(tensors, peer, 0));
  }
}

void BackendTransport::enqueueRecv(int32_t peer, void* data, int64_t num_bytes) {
  if (!isAborted()) {
    std::vector<at::Tensor> tensors{bytesAt(data, num_bytes)};
    orderAlone(backend_->recv(tensors, peer, 0));
  }
}

void BackendTransport::enqueueBroadcast(int32_t root, void* data, int64_t num_bytes) {
  if (!isAborted()) {
    std::vector<at::Tensor> tensors{bytesAt(data, num_bytes)};
    ::c10d::BroadcastOptions options;
    options.rootRank = root;
    order(backend_->broadcast(tensors, options));
  }
}

void BackendTransport::enqueue(std::function<void(void* stream)> launch) {
  if (!isAborted()) {
    launch(nullptr);  // the line's stream is this thread's current one
  }
}

void BackendTransport::whenReached(std::function<void(const transport::StreamFailure* failure)> told) {
  line_->whenPassed([told = std::move(told), state = state_](const std::string* error) {
    std::unique_lock lock(state->mutex);
    if (error != nullptr && !state->failure.has_value()) {
      state->failure = transport::StreamFailure{*error, -1};
    }
    const std::optional<transport::StreamFailure> failure = state->failure;
    lock.unlock();
    told(failure.has_value() ? &*failure : nullptr);
  });
}

void BackendTransport::abort(const transport::StreamFailure& failure) noexcept {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->failure.has_value()) {
      return;
    }
    state_->failure = failure;
  }
  try {
    backend_->abort();
  } catch (const std::exception& error) {
    LOG(WARNING) << "xmesh: a communicator could not be aborted, what waits on it does so until its own timeout: " << error.what();
  }
}

}  // namespace xmesh::c10d_backend
