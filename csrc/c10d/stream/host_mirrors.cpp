#include "c10d/stream/host_mirrors.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty.h>

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

}  // namespace

runtime::LocalTensor HostMirrors::mirror(std::vector<Pair>& pairs, const at::Tensor& tensor) const {
  const at::Tensor host = at::empty(tensor.sizes(), hostMemory(hasPinnedMemory(tensor.device().type())).dtype(tensor.scalar_type()));
  // Without the caller's Python object: other threads drop it without the GIL.
  pairs.push_back({host, tensor.detach()});
  return plainMemoryOf(host);
}

void HostMirrors::standIn(runtime::Movement& movement, const std::vector<at::Tensor>& src, const std::vector<at::Tensor>& dst) {
  const runtime::PreparedPlan& prepared = *movement.prepared;
  for (size_t i = 0; i < prepared.devices.size(); ++i) {
    const auto tensor = static_cast<int64_t>(i);
    if (prepared.program->srcShape(tensor).has_value() && !src.at(i).is_cpu()) {
      movement.src.at(i) = mirror(sources_, src[i]);
    }
    if (prepared.program->dstShape(tensor).has_value() && !dst.at(i).is_cpu()) {
      movement.dst.at(i) = mirror(destinations_, dst[i]);
    }
  }
  movement.mirrors = shared_from_this();
}

void HostMirrors::fetch(Told told) {
  if (sources_.empty()) {
    return told(nullptr);
  }
  line_->post([self = shared_from_this(), told = std::move(told)] {
    try {
      self->call_->waitForCaller(nullptr);
      for (const Pair& pair : self->sources_) {
        pair.host.copy_(pair.device, /*non_blocking=*/true);
      }
      self->line_->whenPassed([self, told](const std::string* error) { told(error); });
    } catch (const std::exception& error) {
      const std::string text = error.what();
      told(&text);
    }
  });
}

void HostMirrors::store(std::function<void()> enqueued, Told told) {
  if (destinations_.empty()) {
    enqueued();
    return told(nullptr);
  }
  line_->post([self = shared_from_this(), enqueued = std::move(enqueued), told = std::move(told)] {
    try {
      self->call_->waitForCaller(nullptr);
      for (const Pair& pair : self->destinations_) {
        pair.device.copy_(pair.host, /*non_blocking=*/true);
      }
      self->call_->markEnd(nullptr);
      self->line_->whenPassed([self, told](const std::string* error) { told(error); });
      enqueued();
    } catch (const std::exception& error) {
      const std::string text = error.what();
      told(&text);
    }
  });
}

}  // namespace xmesh::c10d_backend
