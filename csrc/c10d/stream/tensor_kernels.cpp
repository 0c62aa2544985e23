#include "c10d/stream/tensor_kernels.h"

#include <ATen/ATen.h>

#include <array>
#include <limits>

#include "runtime/memory/sub_boxes.h"

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

at::Tensor tensorOf(const StridedBox& box, at::ScalarType type, c10::Device device) {
  const auto item_bytes = static_cast<int64_t>(c10::elementSize(type));
  std::vector<int64_t> sizes(box.extents.begin(), box.extents.begin() + static_cast<ptrdiff_t>(box.num_dims));
  std::vector<int64_t> strides;
  for (size_t d = 0; d < box.num_dims; ++d) {
    strides.push_back(box.stride_bytes[d] / item_bytes);
  }
  return tensorAt(box.base + box.offset_bytes, sizes, strides, type, device);
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

/// Adds a contribution to an accumulator of the same sizes.
void accumulate(const Reduction& reduction, at::Tensor sum, const at::Tensor& contribution) {
  const at::Tensor next = contribution.to(sum.scalar_type());
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

}  // namespace

void TensorKernels::pack(void* /*stream*/, std::span<const runtime::PackedRange> ranges) const {
  for (const runtime::PackedRange& range : ranges) {
    std::byte* out = range.dense;
    runtime::forEachSubBox(range.box, range.begin, range.end, [&](const StridedBox& box) {
      const at::Tensor from = tensorOf(box, itemType(range.item_bytes), device_);
      dense(out, from.numel(), from.scalar_type(), device_).view(from.sizes()).copy_(from, /*non_blocking=*/true);
      out += from.nbytes();
    });
  }
}

void TensorKernels::unpack(void* /*stream*/, std::span<const runtime::PackedRange> ranges) const {
  for (const runtime::PackedRange& range : ranges) {
    const std::byte* in = range.dense;
    runtime::forEachSubBox(range.box, range.begin, range.end, [&](const StridedBox& box) {
      at::Tensor to = tensorOf(box, itemType(range.item_bytes), device_);
      to.copy_(dense(in, to.numel(), to.scalar_type(), device_).view(to.sizes()), /*non_blocking=*/true);
      in += to.nbytes();
    });
  }
}

void TensorKernels::copy(void* /*stream*/, std::span<const runtime::BoxPair> pairs) const {
  for (const runtime::BoxPair& pair : pairs) {
    if (pair.num_elements > 0) {
      at::Tensor to = tensorOf(pair.dst, itemType(pair.item_bytes), device_);
      to.copy_(tensorOf(pair.src, to.scalar_type(), device_).reshape(to.sizes()), /*non_blocking=*/true);
    }
  }
}

void TensorKernels::reduce(void* /*stream*/, std::span<const runtime::ReductionPart> parts) const {
  for (const runtime::ReductionPart& part : parts) {
    reducePart(part);
  }
}

void TensorKernels::reducePart(const runtime::ReductionPart& part) const {
  const Reduction& reduction = part.reduction;
  const at::Tensor sum = dense(part.accumulator, part.num_elements, accumulatorType(reduction), device_);
  // Calls `visit` with a tensor of each sub-box and the same elements of the sum.
  const auto for_each = [&](const StridedBox& whole, int64_t begin, at::ScalarType type, const auto& visit) {
    int64_t done = 0;
    runtime::forEachSubBox(whole, begin, begin + part.num_elements, [&](const StridedBox& box) {
      const at::Tensor elements = tensorOf(box, type, device_);
      visit(elements, sum.narrow(0, done, elements.numel()).view(elements.sizes()));
      done += elements.numel();
    });
  };
  bool is_first = !part.goes_on;
  for (const runtime::Contribution& contribution : part.contributions) {
    const at::ScalarType type = contribution.is_sum ? sum.scalar_type() : signedType(reduction.type);
    for_each(contribution.box, contribution.begin, type, [&](const at::Tensor& elements, const at::Tensor& into) {
      if (is_first) {
        into.copy_(elements, /*non_blocking=*/true);
      } else {
        accumulate(reduction, into, elements);
      }
    });
    is_first = false;
  }
  if (!part.ends) {
    return;
  }
  if (reduction.divisor != 1) {
    sum.div_(reduction.divisor);
  }
  for_each(part.dst, part.dst_begin, signedType(reduction.type), [](const at::Tensor& elements, const at::Tensor& value) {
    if (elements.data_ptr() != value.data_ptr()) {
      elements.copy_(value, /*non_blocking=*/true);
    }
  });
}

}  // namespace xmesh::c10d_backend
