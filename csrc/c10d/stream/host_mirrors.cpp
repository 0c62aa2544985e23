#include "c10d/stream/host_mirrors.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "c10d/movement.h"

namespace xmesh::c10d_backend {
namespace {

at::TensorOptions hostMemory(bool is_pinned) { return at::TensorOptions(c10::kCPU).pinned_memory(is_pinned); }

/// Whether torch has host memory here that this device copies from and to by itself.
bool hasPinnedMemory(c10::DeviceType type) {
  static const std::optional<c10::DeviceType> pins = []() -> std::optional<c10::DeviceType> {
    try {
      at::empty({1}, hostMemory(true));
      return at::getAccelerator();
    } catch (const std::exception&) {
      return std::nullopt;
    }
  }();
  return pins == type;
}

/// The memory alone: tensors that a caller made in inference mode may not be written outside of it.
at::Tensor memoryOf(const at::Tensor& tensor) {
  const at::TensorOptions options = at::TensorOptions(tensor.scalar_type()).device(tensor.device());
  return at::for_blob(tensor.data_ptr(), tensor.sizes()).strides(tensor.strides()).options(options).target_device(tensor.device()).make_tensor();
}

void copyTensor(const at::Tensor& to, const at::Tensor& from) {
  if (to.numel() > 0) {
    memoryOf(to).copy_(memoryOf(from), /*non_blocking=*/true);
  }
}

}  // namespace

runtime::LocalTensor HostMirrors::mirror(std::vector<Pair>& pairs, const at::Tensor& tensor) {
  const at::Tensor host = at::empty(tensor.sizes(), hostMemory(hasPinnedMemory(tensor.device().type())).dtype(tensor.scalar_type()));
  // Without the caller's Python object: other threads drop it without the GIL.
  pairs.push_back({host, tensor.detach()});
  return plainMemoryOf(host);
}

void HostMirrors::standIn(runtime::Movement& movement, const std::vector<at::Tensor>& src, const std::vector<at::Tensor>& dst) {
  const runtime::Program& program = *movement.prepared->program;
  for (int64_t i = 0; i < program.numSources(); ++i) {
    if (program.srcShape(i).has_value() && !src.at(i).is_cpu()) {
      movement.src.at(i) = mirror(sources_, src[i]);
    }
  }
  for (int64_t i = 0; i < program.numDestinations(); ++i) {
    if (program.dstShape(i).has_value() && !dst.at(i).is_cpu()) {
      movement.dst.at(i) = mirror(destinations_, dst[i]);
    }
  }
  movement.mirrors = shared_from_this();
}

void HostMirrors::onLine(const std::shared_ptr<DeviceLine>& line, std::function<void()> copy, Told told) {
  line->post([self = shared_from_this(), line, copy = std::move(copy), told = std::move(told)] {
    if (self->is_given_up_) {
      return;
    }
    std::optional<std::string> failure;
    try {
      self->call_->waitForCaller(nullptr);
      copy();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    try {  // also after a failure: what was enqueued before it still uses the memory
      line->whenPassed([self, told, failure](const std::string* error) { told(failure.has_value() ? &*failure : error); });
    } catch (const std::exception& error) {
      const std::string text = failure.value_or(error.what());
      told(&text);
    }
  });
}

void HostMirrors::fetch(Told told) {
  if (sources_.empty()) {
    return told(nullptr);
  }
  onLine(
      lines_.to_host,
      [this] {
        for (const Pair& pair : sources_) {
          copyTensor(pair.host, pair.device);
        }
      },
      std::move(told));
}

void HostMirrors::store(std::function<void()> enqueued, Told told) {
  if (destinations_.empty()) {
    enqueued();
    return told(nullptr);
  }
  onLine(
      lines_.from_host,
      [this, enqueued = std::move(enqueued)] {
        for (const Pair& pair : destinations_) {
          copyTensor(pair.device, pair.host);
        }
        call_->markEnd(nullptr);
        enqueued();
      },
      std::move(told));
}

}  // namespace xmesh::c10d_backend
