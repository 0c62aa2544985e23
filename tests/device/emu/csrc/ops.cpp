// Operators by hand: those that make tensors and views, copies, and what reads a value.
#include "ops.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <mutex>
#include <vector>

#include "allocator.h"
#include "runtime.h"

namespace emu {
namespace {

using at::IntArrayRef;
using at::Tensor;

struct Kept {
  std::mutex mutex;
  std::vector<Tensor> tensors;
};
Kept& kept() {
  static auto* instance = new Kept;
  return *instance;
}

c10::Device deviceOr(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : c10::Device(kDeviceType, currentDevice());
}

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor emptyMemoryFormat(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                         std::optional<c10::Device> device, std::optional<bool> /*pinned*/, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(deviceOr(device));
  return at::detail::empty_generic(size, &allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor emptyStrided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                    std::optional<c10::Device> device, std::optional<bool> /*pinned*/) {
  const c10::DeviceGuard guard(deviceOr(device));
  return at::detail::empty_strided_generic(size, stride, &allocator(), kKeys, c10::dtype_or_default(dtype));
}

void growStorage(const Tensor& tensor) {
  const auto num_bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.dtype().itemsize(), tensor.storage_offset());
  if (tensor.numel() > 0 && num_bytes > tensor.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), num_bytes);
  }
}

const Tensor& resize(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  if (self.sizes() != size) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    growStorage(self);
  }
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& setStorageAndStrides(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.data() != nullptr && stride.size() == size.size()) {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  }
  growStorage(self);
  return self;
}

Tensor& setEmpty(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  at::Storage storage(at::Storage::use_byte_size_t(), 0, allocator().allocate(0), &allocator(), true);
  return setStorageAndStrides(self, std::move(storage), 0, {0}, {});
}

void copyBetweenDevices(const Tensor& from, const Tensor& to) {
  auto& source = currentWorker(from.device().index());
  auto& destination = currentWorker(to.device().index());
  source.block(destination.record());
  source.enqueue([from = aliasOf(from), to = aliasOf(to)] { to.copy_(from); });
  destination.block(source.record());
}

// Copies that end or begin on the host. The host's tensor is kept until the copy has run.
void copyWithHost(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool to_host = to.is_cpu();
  auto host = detached(to_host ? to : from);
  const auto device = aliasOf(to_host ? from : to);
  auto& worker = currentWorker((to_host ? from : to).device().index());
  worker.enqueue([host = std::move(host), device, to_host]() mutable {
    if (to_host) {
      host.copy_(device);
    } else {
      device.copy_(host);
    }
    keepForCaller(std::move(host));
  });
  if (!non_blocking) worker.synchronize();
}

Tensor copyFrom(const Tensor& self, const Tensor& destination, bool non_blocking) {
  dropKept();
  if (destination.numel() == 0) return destination;
  const auto source = self.expand(destination.sizes());
  if (source.device() == destination.device()) {
    ++operatorCounts().num_async;
    currentWorker(source.device().index()).enqueue([from = aliasOf(source), to = aliasOf(destination)] { to.copy_(from); });
  } else if (source.is_privateuseone() && destination.is_privateuseone()) {
    copyBetweenDevices(source, destination);
  } else {
    TORCH_CHECK((source.is_cpu() || destination.is_cpu()), "emu: no copy from ", source.device(), " to ", destination.device());
    copyWithHost(source, destination, non_blocking);
  }
  return destination;
}

Tensor copyFromAndResize(const Tensor& self, const Tensor& destination) {
  destination.resize_(self.sizes());
  return copyFrom(self, destination, false);
}

at::Scalar readScalar(const Tensor& self) {
  dropKept();
  currentWorker(self.device().index()).synchronize();
  return aliasOf(self).item();
}

void recordStream(Tensor& self, c10::Stream stream) { allocator().recordStream(self.storage().data_ptr(), stream); }

}  // namespace

Tensor aliasOf(const Tensor& tensor) {
  const auto& impl = *tensor.unsafeGetTensorImpl();
  auto alias = at::from_blob(const_cast<void*>(impl.data()), tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.scalar_type()));
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

Tensor detached(const Tensor& tensor) {
  return Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), /*allow_tensor_metadata_change=*/false));
}

void keepForCaller(Tensor tensor) {
  std::lock_guard lock(kept().mutex);
  kept().tensors.push_back(std::move(tensor));
}

void dropKept() {
  std::vector<Tensor> dropped;  // goes after the lock: what it drops may take other locks
  std::lock_guard lock(kept().mutex);
  dropped.swap(kept().tensors);
}

OperatorCounts& operatorCounts() {
  static auto* counts = new OperatorCounts;
  return *counts;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", emptyMemoryFormat);
  library.impl("empty_strided", emptyStrided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("is_set_to", at::native::is_set_to);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_));
  library.impl("set_.source_Storage_storage_offset", setStorageAndStrides);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_", setEmpty);
  library.impl("_copy_from", copyFrom);
  library.impl("_copy_from_and_resize", copyFromAndResize);
  library.impl("_local_scalar_dense", readScalar);
  library.impl("record_stream", recordStream);
}

}  // namespace emu
