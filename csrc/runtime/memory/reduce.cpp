#include "runtime/memory/reduce.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>

#include "core/error.h"
#include "runtime/memory/element_math.h"

namespace xmesh::runtime {
namespace {

using core::ReduceOp;

template <typename T, typename Op>
void accumulateAs(void* accumulator, const void* contribution, int64_t num_elements) {
  auto* into = static_cast<Accumulator<T>*>(accumulator);
  const auto* from = static_cast<const std::byte*>(contribution);
  for (int64_t i = 0; i < num_elements; ++i) {
    T value;
    std::memcpy(&value, from + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    into[i] = Op::apply(into[i], widened(value));
  }
}

template <typename T>
void initType(void* accumulator, const void* contribution, int64_t num_elements) {
  if constexpr (kIsHalf<T>) {
    auto* into = static_cast<float*>(accumulator);
    const auto* from = static_cast<const std::byte*>(contribution);
    for (int64_t i = 0; i < num_elements; ++i) {
      T value;
      std::memcpy(&value, from + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
      into[i] = widened(value);
    }
  } else {
    std::memcpy(accumulator, contribution, static_cast<size_t>(num_elements) * sizeof(T));
  }
}

template <typename T>
void finishType(int64_t divisor, void* accumulator, int64_t num_elements) {
  if (divisor != 1) {
    auto* values = static_cast<Accumulator<T>*>(accumulator);
    for (int64_t i = 0; i < num_elements; ++i) {
      values[i] = divided(values[i], divisor);
    }
  }
  if constexpr (kIsHalf<T>) {
    // In blocks by way of the stack: the result lies where the accumulator lies, but overtakes no float that is still to be read.
    constexpr int64_t kBlock = 256;
    auto* bytes = static_cast<std::byte*>(accumulator);
    std::array<float, kBlock> values;
    std::array<T, kBlock> results;
    for (int64_t begin = 0; begin < num_elements; begin += kBlock) {
      const int64_t count = std::min(kBlock, num_elements - begin);
      std::memcpy(values.data(), bytes + begin * static_cast<int64_t>(sizeof(float)), static_cast<size_t>(count) * sizeof(float));
      for (int64_t i = 0; i < count; ++i) {
        results[static_cast<size_t>(i)] = rounded<T>(values[static_cast<size_t>(i)]);
      }
      std::memcpy(bytes + begin * static_cast<int64_t>(sizeof(T)), results.data(), static_cast<size_t>(count) * sizeof(T));
    }
  }
}

constexpr std::array<std::string_view, 14> kTypeNames = {"int8",   "int16",   "int32",    "int64",   "uint8",   "uint16",    "uint32",
                                                         "uint64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"};

}  // namespace

int64_t Reduction::itemBytes() const {
  int64_t bytes = 0;
  withType(type, [&bytes](auto value) { bytes = static_cast<int64_t>(sizeof(value)); });
  return bytes;
}

int64_t Reduction::accumulatorItemBytes() const {
  return core::DType{std::string(kTypeNames[static_cast<size_t>(type)]), itemBytes()}.accumulatorItemBytes();
}

Reduction Reduction::ofSums() const {
  Reduction out = *this;
  withType(type, [&out](auto value) { out.type = kIsHalf<decltype(value)> ? ElementType::kFloat32 : out.type; });
  return out;
}

Reduction reductionOf(const core::TensorSpec& spec) {
  Reduction out;
  size_t index = 0;
  while (index < kTypeNames.size() && kTypeNames[index] != spec.dtype.name) {
    ++index;
  }
  core::require(index < kTypeNames.size(), "contributions of dtype " + spec.dtype.name + " cannot be reduced");
  out.type = static_cast<ElementType>(index);
  for (size_t axis = 0; axis < spec.placements.size(); ++axis) {
    const core::Placement& placement = spec.placements[axis];
    if (placement.kind != core::PlacementKind::kPartial) {
      continue;
    }
    if (placement.reduce_op == ReduceOp::kAvg) {
      out.divisor *= spec.mesh.shape()[axis];
      out.op = ReduceOp::kAvg;
    } else if (out.op != ReduceOp::kAvg) {
      out.op = placement.reduce_op;
    }
  }
  return out;
}

void initAccumulator(const Reduction& reduction, void* accumulator, const void* contribution, int64_t num_elements) {
  withType(reduction.type, [&](auto value) { initType<decltype(value)>(accumulator, contribution, num_elements); });
}

void accumulate(const Reduction& reduction, void* accumulator, const void* contribution, int64_t num_elements) {
  withType(reduction.type, [&](auto value) {
    using T = decltype(value);
    withOperation<T>(reduction.op, [&](auto op) { accumulateAs<T, decltype(op)>(accumulator, contribution, num_elements); });
  });
}

void finishAccumulator(const Reduction& reduction, void* accumulator, int64_t num_elements) {
  withType(reduction.type, [&](auto value) { finishType<decltype(value)>(reduction.divisor, accumulator, num_elements); });
}

}  // namespace xmesh::runtime
