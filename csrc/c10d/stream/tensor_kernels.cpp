#include "c10d/stream/tensor_kernels.h"

#include <ATen/ATen.h>

#include <array>
#include <limits>

#include "runtime/sub_boxes.h"

namespace xmesh::c10d_backend {
namespace {

using runtime::ElementType;
using runtime::Reduction;
using runtime::StridedBox;

at::ScalarType itemType(int64_t item_bytes) {
  switch (item_bytes) {
    case 1:
      return at::kByte;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    case 8:
      return at::kLong;
    default:
      TORCH_CHECK(item_bytes == 16, "xmesh: no dtype has elements of ", item_bytes, " bytes");
      return at::kComplexDouble;
  }
}

at::Tensor tensorAt(void* data, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, c10::Device device) {
  return at::for_blob(data, sizes).strides(strides).options(at::TensorOptions(type).device(device)).target_device(device).make_tensor();
}

at::Tensor dense(const void* data, int64_t num_elements, at::ScalarType type, c10::Device device) {
  return tensorAt(const_cast<void*>(data), {num_elements}, {1}, type, device);
}

at::Tensor tensorOf(const StridedBox& box, int64_t item_bytes, c10::Device device) {
  std::vector<int64_t> sizes(box.extents.begin(), box.extents.begin() + static_cast<ptrdiff_t>(box.num_dims));
  std::vector<int64_t> strides;
  for (size_t d = 0; d < box.num_dims; ++d) {
    strides.push_back(box.stride_bytes[d] / item_bytes);
  }
  return tensorAt(box.base + box.offset_bytes, sizes, strides, itemType(item_bytes), device);
}

/// By ElementType. Integers wrap alike with and without a sign; only min and max look at it.
constexpr std::array<at::ScalarType, 14> kSignedTypes = {at::kChar,  at::kShort,  at::kInt,          at::kLong,         at::kByte,
                                                         at::kShort, at::kInt,    at::kLong,         at::kHalf,         at::kBFloat16,
                                                         at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble};

at::ScalarType signedType(ElementType type) { return kSignedTypes.at(static_cast<size_t>(type)); }

at::ScalarType accumulatorType(const Reduction& reduction) { return reduction.accumulatesInPlace() ? signedType(reduction.type) : at::kFloat; }

/// What turns the order of unsigned integers, read as signed ones, into that of signed ones; 0 where nothing is to be done.
int64_t signFlip(ElementType type) {
  switch (type) {
    case ElementType::kUInt16:
      return std::numeric_limits<int16_t>::min();
    case ElementType::kUInt32:
      return std::numeric_limits<int32_t>::min();
    case ElementType::kUInt64:
      return std::numeric_limits<int64_t>::min();
    default:
      return 0;
  }
}

}  // namespace

void TensorKernels::pack(void* /*stream*/, const StridedBox& src, int64_t begin, int64_t end, int64_t item_bytes, void* dst) const {
  auto* out = static_cast<std::byte*>(dst);
  runtime::forEachSubBox(src, begin, end, [&](const StridedBox& part) {
    const at::Tensor from = tensorOf(part, item_bytes, device_);
    dense(out, from.numel(), itemType(item_bytes), device_).view(from.sizes()).copy_(from, /*non_blocking=*/true);
    out += from.numel() * item_bytes;
  });
}

void TensorKernels::unpack(void* /*stream*/, const void* src, const StridedBox& dst, int64_t begin, int64_t end, int64_t item_bytes) const {
  const auto* in = static_cast<const std::byte*>(src);
  runtime::forEachSubBox(dst, begin, end, [&](const StridedBox& part) {
    at::Tensor to = tensorOf(part, item_bytes, device_);
    to.copy_(dense(in, to.numel(), itemType(item_bytes), device_).view(to.sizes()), /*non_blocking=*/true);
    in += to.numel() * item_bytes;
  });
}

void TensorKernels::copy(void* /*stream*/, const StridedBox& src, const StridedBox& dst, int64_t num_elements, int64_t item_bytes) const {
  if (num_elements == 0) {
    return;
  }
  at::Tensor to = tensorOf(dst, item_bytes, device_);
  to.copy_(tensorOf(src, item_bytes, device_).reshape(to.sizes()), /*non_blocking=*/true);
}

void TensorKernels::initAccumulator(void* /*stream*/, const Reduction& reduction, void* accumulator, const void* contribution,
                                    int64_t num_elements) const {
  dense(accumulator, num_elements, accumulatorType(reduction), device_)
      .copy_(dense(contribution, num_elements, signedType(reduction.type), device_), /*non_blocking=*/true);
}

void TensorKernels::accumulate(void* /*stream*/, const Reduction& reduction, void* accumulator, const void* contribution,
                               int64_t num_elements) const {
  at::Tensor sum = dense(accumulator, num_elements, accumulatorType(reduction), device_);
  at::Tensor next = dense(contribution, num_elements, signedType(reduction.type), device_).to(sum.scalar_type());
  if (reduction.op == core::ReduceOp::kSum || reduction.op == core::ReduceOp::kAvg) {
    sum.add_(next);
  } else if (reduction.op == core::ReduceOp::kProduct) {
    sum.mul_(next);
  } else {
    const int64_t flip = signFlip(reduction.type);
    const at::Tensor a = flip == 0 ? sum : sum.bitwise_xor(flip);
    const at::Tensor b = flip == 0 ? next : next.bitwise_xor(flip);
    const at::Tensor chosen = reduction.op == core::ReduceOp::kMin ? at::minimum(a, b) : at::maximum(a, b);
    sum.copy_(flip == 0 ? chosen : chosen.bitwise_xor(flip));
  }
}

void TensorKernels::finishAccumulator(void* /*stream*/, const Reduction& reduction, void* accumulator, int64_t num_elements) const {
  at::Tensor sum = dense(accumulator, num_elements, accumulatorType(reduction), device_);
  if (reduction.divisor != 1) {
    sum.div_(reduction.divisor);
  }
  if (!reduction.accumulatesInPlace()) {
    const at::Tensor rounded = sum.to(signedType(reduction.type));
    dense(accumulator, num_elements, rounded.scalar_type(), device_).copy_(rounded);
  }
}

}  // namespace xmesh::c10d_backend
