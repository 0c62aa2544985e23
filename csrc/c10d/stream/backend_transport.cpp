#include "c10d/stream/backend_transport.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "c10d/stream/communicator_use.h"

namespace xmesh::c10d_backend {
namespace {

constexpr std::chrono::seconds kEnqueuePatience{2};  ///< in which what is enqueued without waiting for a peer is enqueued
constexpr const char* kNotAborted = "xmesh: a communicator could not be aborted, what waits on it does so until its own timeout: ";

/// The current stream goes on behind it; a call that ran on the current stream has no Work.
void order(const c10::intrusive_ptr<::c10d::Work>& work) {
  if (work) {
    work->wait();
  }
}

}  // namespace

BackendTransport::BackendTransport(c10::intrusive_ptr<::c10d::Backend> backend, std::shared_ptr<DeviceLine> line,
                                   std::shared_ptr<CommunicatorThreads> threads)
    : backend_(std::move(backend)), line_(std::move(line)), threads_(std::move(threads)) {
  ++communicatorUse().count;
}

void BackendTransport::connect() {
  threads_->making.run([backend = backend_, state = state_, device = line_->device()] {
    std::optional<transport::StreamFailure> failure;
    const int64_t free_before = freeBytes(device);
    try {
      const c10::DeviceGuard on_device(device);
      backend->setBoundDeviceId(device);
      backend->eagerConnectSingleDevice(device);
    } catch (const std::exception& error) {
      failure = {error.what(), -1};
    }
    const int64_t num_bytes = free_before < 0 ? 0 : std::max<int64_t>(0, free_before - freeBytes(device));
    {
      const std::lock_guard lock(state->mutex);
      if (!state->failure.has_value()) {
        state->failure = std::move(failure);
      }
      state->is_connected = !state->failure.has_value();
      state->changed.notify_all();
      if (state->is_connected) {
        state->num_bytes = num_bytes;
        communicatorUse().num_bytes += state->num_bytes;
        return;
      }
    }
    abortBackend(*backend, *state);
  });
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [this] { return state_->is_connected || state_->failure.has_value(); });
  if (state_->failure.has_value()) {
    throw std::runtime_error(state_->failure->reason);
  }
}

BackendTransport::~BackendTransport() {
  abort({"its communicator was given up", -1});
  try {
    threads_->ending.run([backend = std::move(backend_), state = state_]() mutable {
      backend.reset();
      const std::lock_guard lock(state->mutex);
      communicatorUse().num_bytes -= std::exchange(state->num_bytes, 0);
    });
  } catch (const std::exception& error) {
    LOG(WARNING) << "xmesh: a communicator could not be ended on a thread of its own: " << error.what();
  }
  --communicatorUse().count;
}

std::unique_lock<std::timed_mutex> BackendTransport::enter() const {
  std::unique_lock inside(state_->inside);
  if (isAborted()) {
    inside.unlock();
  }
  return inside;
}

std::optional<transport::StreamFailure> BackendTransport::failure() const {
  const std::lock_guard lock(state_->mutex);
  return state_->failure;
}

at::Tensor BackendTransport::bytesAt(void* data, int64_t num_bytes) const {
  return at::for_blob(data, {num_bytes}).options(at::TensorOptions(at::kByte).device(line_->device())).target_device(line_->device()).make_tensor();
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
  if (auto inside = enter(); inside.owns_lock()) {
    backend_->startCoalescing();
    group_ = std::move(inside);
  }
}

void BackendTransport::groupEnd() {
  if (!group_.owns_lock()) {
    return;
  }
  const auto inside = std::exchange(group_, {});
  try {
    order(backend_->endCoalescing());
  } catch (const std::exception&) {
    if (!isAborted()) {
      throw;
    }
  }
}

/// A message outside groups; those of a group are ordered at its end.
void BackendTransport::message(const std::function<c10::intrusive_ptr<::c10d::Work>()>& enqueue) {
  if (group_.owns_lock()) {
    enqueue();
  } else if (const auto inside = enter(); inside.owns_lock()) {
    order(enqueue());
  }
}

void BackendTransport::enqueueSend(int32_t peer, const void* data, int64_t num_bytes) {
  std::vector<at::Tensor> tensors{bytesAt(const_cast<void*>(data), num_bytes)};
  message([&] { return backend_->send(tensors, peer, 0); });
}

void BackendTransport::enqueueRecv(int32_t peer, void* data, int64_t num_bytes) {
  std::vector<at::Tensor> tensors{bytesAt(data, num_bytes)};
  message([&] { return backend_->recv(tensors, peer, 0); });
}

void BackendTransport::enqueueBroadcast(int32_t root, void* data, int64_t num_bytes) {
  std::vector<at::Tensor> tensors{bytesAt(data, num_bytes)};
  ::c10d::BroadcastOptions options;
  options.rootRank = root;
  message([&] { return backend_->broadcast(tensors, options); });
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
    state_->changed.notify_all();
  }
  try {
    threads_->ending.run([backend = backend_, state = state_] { abortBackend(*backend, *state); });
  } catch (const std::exception& error) {
    LOG(WARNING) << kNotAborted << error.what();
  }
}

/// The line's thread may be inside because it sets up a connection to a rank that is gone; then only the abort itself gets it out.
void BackendTransport::abortBackend(::c10d::Backend& backend, State& state) noexcept {
  try {
    const std::unique_lock outside(state.inside, kEnqueuePatience);
    backend.abort();
  } catch (const std::exception& error) {
    LOG(WARNING) << kNotAborted << error.what();
  }
}

}  // namespace xmesh::c10d_backend
