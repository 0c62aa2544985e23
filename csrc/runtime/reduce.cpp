#include "runtime/reduce.h"

#include <algorithm>
#include <array>
#include <bit>
#include <complex>
#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

#include "core/error.h"

namespace xmesh::runtime {
namespace {

using core::ReduceOp;

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

float toFloat(BFloat16 value) { return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }

float toFloat(Float16 value) {
  // Exponent and mantissa read as a float are too small by 2^112, subnormals too; infinities and NaNs need their exponent filled.
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffU) << 13;
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000U) << 16;
  const uint32_t scaled = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112F);
  const uint32_t special = magnitude >= 0x0f800000U ? 0x7f800000U : 0U;
  return std::bit_cast<float>(scaled | special | sign);
}

BFloat16 roundTo(float value, BFloat16 /*type*/) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const bool is_nan = (bits & 0x7fffffffU) > 0x7f800000U;
  const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  return {static_cast<uint16_t>(is_nan ? 0x7fc0U : rounded)};
}

Float16 roundTo(float value, Float16 /*type*/) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000U;
  const uint32_t magnitude = bits & 0x7fffffffU;
  // Normal: rebias the exponent, round to nearest even; a carry into infinity is right.
  const uint32_t normal = (magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
  // Subnormal: the last place of 0.5f is float16's smallest step.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3f000000U;
  const uint32_t special = magnitude > 0x7f800000U ? 0x7e00U : 0x7c00U;
  uint32_t out = magnitude < 0x38800000U ? subnormal : normal;
  out = magnitude >= 0x47800000U ? special : out;  // 2^16 and more
  return {static_cast<uint16_t>(out | sign)};
}

template <typename T>
constexpr bool kIsHalf = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;
template <typename T>
struct IsComplex : std::false_type {};
template <typename T>
struct IsComplex<std::complex<T>> : std::true_type {};

template <typename T>
using Accumulator = std::conditional_t<kIsHalf<T>, float, T>;

template <typename T>
Accumulator<T> load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  if constexpr (kIsHalf<T>) {
    return toFloat(value);
  } else {
    return value;
  }
}

struct Sum {
  template <typename T>
  static T apply(T left, T right) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<uint64_t>(left) + static_cast<uint64_t>(right));
    } else {
      return left + right;
    }
  }
};
struct Product {
  template <typename T>
  static T apply(T left, T right) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<uint64_t>(left) * static_cast<uint64_t>(right));
    } else if constexpr (IsComplex<T>::value) {
      return {left.real() * right.real() - left.imag() * right.imag(), left.real() * right.imag() + left.imag() * right.real()};
    } else {
      return left * right;
    }
  }
};
struct Min {
  template <typename T>
  static T apply(T left, T right) {
    return left < right || left != left ? left : right;  // a NaN on either side wins
  }
};
struct Max {
  template <typename T>
  static T apply(T left, T right) {
    return left > right || left != left ? left : right;
  }
};

template <typename T, typename Op>
void accumulateAs(void* accumulator, const void* contribution, int64_t num_elements) {
  auto* into = static_cast<Accumulator<T>*>(accumulator);
  const auto* from = static_cast<const std::byte*>(contribution);
  for (int64_t i = 0; i < num_elements; ++i) {
    into[i] = Op::apply(into[i], load<T>(from + i * static_cast<int64_t>(sizeof(T))));
  }
}

template <typename T>
void accumulateType(ReduceOp op, void* accumulator, const void* contribution, int64_t num_elements) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return accumulateAs<T, Sum>(accumulator, contribution, num_elements);
    case ReduceOp::kProduct:
      return accumulateAs<T, Product>(accumulator, contribution, num_elements);
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      if constexpr (!IsComplex<T>::value) {
        return op == ReduceOp::kMin ? accumulateAs<T, Min>(accumulator, contribution, num_elements)
                                    : accumulateAs<T, Max>(accumulator, contribution, num_elements);
      }
  }
}

template <typename T>
void initType(void* accumulator, const void* contribution, int64_t num_elements) {
  if constexpr (kIsHalf<T>) {
    auto* into = static_cast<float*>(accumulator);
    const auto* from = static_cast<const std::byte*>(contribution);
    for (int64_t i = 0; i < num_elements; ++i) {
      into[i] = load<T>(from + i * static_cast<int64_t>(sizeof(T)));
    }
  } else {
    std::memcpy(accumulator, contribution, static_cast<size_t>(num_elements) * sizeof(T));
  }
}

template <typename T>
void finishType(int64_t divisor, void* accumulator, int64_t num_elements) {
  using Acc = Accumulator<T>;
  if constexpr (!std::is_integral_v<Acc>) {
    if (divisor != 1) {
      auto* values = static_cast<Acc*>(accumulator);
      typename std::conditional_t<IsComplex<Acc>::value, Acc, std::complex<Acc>>::value_type by(divisor);
      for (int64_t i = 0; i < num_elements; ++i) {
        values[i] /= by;
      }
    }
  }
  if constexpr (kIsHalf<T>) {
    // In blocks by way of the stack: the result lies where the accumulator lies, but overtakes no float that is still to be read.
    constexpr int64_t kBlock = 256;
    auto* bytes = static_cast<std::byte*>(accumulator);
    std::array<float, kBlock> values;
    std::array<T, kBlock> rounded;
    for (int64_t begin = 0; begin < num_elements; begin += kBlock) {
      const int64_t count = std::min(kBlock, num_elements - begin);
      std::memcpy(values.data(), bytes + begin * static_cast<int64_t>(sizeof(float)), static_cast<size_t>(count) * sizeof(float));
      for (int64_t i = 0; i < count; ++i) {
        rounded[static_cast<size_t>(i)] = roundTo(values[static_cast<size_t>(i)], T{});
      }
      std::memcpy(bytes + begin * static_cast<int64_t>(sizeof(T)), rounded.data(), static_cast<size_t>(count) * sizeof(T));
    }
  }
}

/// Calls `body` with a value of the C++ type that stands for `type`.
template <typename Body>
void withType(ElementType type, const Body& body) {
  switch (type) {
    case ElementType::kInt8:
      return body(int8_t{});
    case ElementType::kInt16:
      return body(int16_t{});
    case ElementType::kInt32:
      return body(int32_t{});
    case ElementType::kInt64:
      return body(int64_t{});
    case ElementType::kUInt8:
      return body(uint8_t{});
    case ElementType::kUInt16:
      return body(uint16_t{});
    case ElementType::kUInt32:
      return body(uint32_t{});
    case ElementType::kUInt64:
      return body(uint64_t{});
    case ElementType::kFloat16:
      return body(Float16{});
    case ElementType::kBFloat16:
      return body(BFloat16{});
    case ElementType::kFloat32:
      return body(float{});
    case ElementType::kFloat64:
      return body(double{});
    case ElementType::kComplex64:
      return body(std::complex<float>{});
    case ElementType::kComplex128:
      return body(std::complex<double>{});
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
  withType(reduction.type, [&](auto value) { accumulateType<decltype(value)>(reduction.op, accumulator, contribution, num_elements); });
}

void finishAccumulator(const Reduction& reduction, void* accumulator, int64_t num_elements) {
  withType(reduction.type, [&](auto value) { finishType<decltype(value)>(reduction.divisor, accumulator, num_elements); });
}

}  // namespace xmesh::runtime
