#include "c10d/movement.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "c10d/stream/host_mirrors.h"

namespace xmesh::c10d_backend {
namespace {

runtime::LocalTensor localOf(const at::Tensor& tensor, int16_t kind) {
  const auto expected = static_cast<c10::DeviceType>(kind);
  TORCH_CHECK_VALUE(tensor.device().type() == expected, "xmesh: expected a ", c10::DeviceTypeName(expected, /*lower_case=*/true),
                    " tensor, as its mesh says, got one on ", tensor.device());
  return plainMemoryOf(tensor);
}

/// Memory of a lazy view (Tensor.conj(), .imag of one) has other values than the tensor.
at::Tensor withValuesInMemory(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.is_conj() || tensor.is_neg()) ? tensor.detach().resolve_conj().resolve_neg() : tensor;
}

at::Tensor checkedTarget(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(!tensor.is_conj() && !tensor.is_neg(),
                    "xmesh: nothing can be received into a conjugated or negated view: expected a tensor whose memory has its values");
  return tensor;
}

/// The device that tensors of a call are on here; nothing where all are on the host.
std::optional<c10::Device> deviceOf(const runtime::PreparedPlan& prepared, const std::vector<at::Tensor>& src, const std::vector<at::Tensor>& dst) {
  std::optional<c10::Device> out;
  const auto look = [&out](const at::Tensor& tensor) {
    if (tensor.is_cpu()) {
      return;
    }
    TORCH_CHECK_VALUE(!out.has_value() || *out == tensor.device(), "xmesh: expected the tensors of one call on one device, got ", *out, " and ",
                      tensor.device());
    out = tensor.device();
  };
  for (int64_t i = 0; i < prepared.program->numSources(); ++i) {
    if (prepared.program->srcShape(i).has_value()) {
      look(src.at(i));
    }
  }
  for (int64_t i = 0; i < prepared.program->numDestinations(); ++i) {
    if (prepared.program->dstShape(i).has_value()) {
      look(dst.at(i));
    }
  }
  return out;
}

runtime::Movement movementOf(const std::shared_ptr<const runtime::PreparedPlan>& prepared, const std::vector<at::Tensor>& src,
                             const std::vector<at::Tensor>& dst) {
  // The memory without the tensors: the network's thread drops it without the GIL.
  auto alive = std::make_shared<c10::SmallVector<c10::Storage, 2>>();
  const auto lent = [&alive](const at::Tensor& tensor, int16_t kind) {
    alive->push_back(tensor.storage());
    return localOf(tensor, kind);
  };
  const runtime::Program& program = *prepared->program;
  runtime::Movement out;
  out.prepared = prepared;
  for (int64_t i = 0; i < program.numSources(); ++i) {
    const int16_t kind = prepared->devices.at(program.src_tensors[i]).src;
    out.src.push_back(program.srcShape(i).has_value() ? lent(src.at(i), kind) : runtime::LocalTensor{});
  }
  for (int64_t i = 0; i < program.numDestinations(); ++i) {
    const int16_t kind = prepared->devices.at(program.dst_tensors[i]).dst;
    out.dst.push_back(program.dstShape(i).has_value() ? lent(checkedTarget(dst.at(i)), kind) : runtime::LocalTensor{});
  }
  program.checkLocalTensors(out.src, out.dst);
  out.keep_alive = std::move(alive);
  return out;
}

}  // namespace

runtime::LocalTensor plainMemoryOf(const at::Tensor& tensor) { return {tensor.data_ptr(), tensor.sizes().vec(), tensor.strides().vec()}; }

runtime::DeviceKinds kindsOf(const std::pair<std::string, std::string>& names) {
  const auto kind = [](const std::string& name) { return static_cast<int16_t>(at::Device(name).type()); };
  return {kind(names.first), kind(names.second)};
}

CallMovement Movements::of(const std::shared_ptr<const runtime::PreparedPlan>& prepared, const std::vector<at::Tensor>& src,
                           const std::vector<at::Tensor>& dst) {
  std::vector<at::Tensor> sources;
  sources.reserve(src.size());
  std::transform(src.begin(), src.end(), std::back_inserter(sources), withValuesInMemory);
  CallMovement out{movementOf(prepared, sources, dst), nullptr};
  const std::optional<c10::Device> device = deviceOf(*prepared, sources, dst);
  if (!device.has_value()) {
    return out;
  }
  use(*device);
  out.on_device = std::make_shared<CallOnDevice>(*device);
  out.movement.route = {static_cast<int16_t>(device->type()), device->index(), prepared->through_host};
  if (!prepared->through_host) {
    out.movement.caller = out.on_device;
    return out;
  }
  const auto mirrors = std::make_shared<HostMirrors>(lines_->mirrorLines(*device), out.on_device);
  mirrors->standIn(out.movement, sources, dst);
  if (!mirrors->hasDestinations()) {
    out.on_device = nullptr;
  }
  return out;
}

void Movements::use(c10::Device device) {
  const std::lock_guard lock(mutex_);
  const c10::Device used = used_devices_.try_emplace(device.type(), device).first->second;
  TORCH_CHECK_VALUE(used == device, "xmesh: the reshards of a group keep to one device of a kind on each rank: this rank's are on ", used,
                    ", got a tensor on ", device);
}

}  // namespace xmesh::c10d_backend
