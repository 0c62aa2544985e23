#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "runtime/memory/host_device.h"
#include "runtime/memory/reduce.h"

/// The arithmetic of reductions, one element at a time: what reduce.h promises of values is kept here, for the host and for CUDA kernels.
namespace xmesh::runtime {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
template <typename T>
struct Complex {
  T real;
  T imag;
};

template <typename T>
inline constexpr bool kIsHalf = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;
template <typename T>
struct IsComplex : std::false_type {};
template <typename T>
struct IsComplex<Complex<T>> : std::true_type {};

/// What an element is added up in.
template <typename T>
using Accumulator = std::conditional_t<kIsHalf<T>, float, T>;

namespace detail {

XMESH_HOST_DEVICE inline uint32_t bitsOf(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

XMESH_HOST_DEVICE inline float floatOf(uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace detail

XMESH_HOST_DEVICE inline float toFloat(BFloat16 value) { return detail::floatOf(static_cast<uint32_t>(value.bits) << 16); }

XMESH_HOST_DEVICE inline float toFloat(Float16 value) {
  // Exponent and mantissa read as a float are too small by 2^112, subnormals too; infinities and NaNs need their exponent filled.
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffU) << 13;
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000U) << 16;
  const uint32_t scaled = detail::bitsOf(detail::floatOf(magnitude) * 0x1p112F);
  const uint32_t special = magnitude >= 0x0f800000U ? 0x7f800000U : 0U;
  return detail::floatOf(scaled | special | sign);
}

XMESH_HOST_DEVICE inline BFloat16 roundTo(float value, BFloat16 /*type*/) {
  const uint32_t bits = detail::bitsOf(value);
  const bool is_nan = (bits & 0x7fffffffU) > 0x7f800000U;
  const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  return {static_cast<uint16_t>(is_nan ? 0x7fc0U : rounded)};
}

XMESH_HOST_DEVICE inline Float16 roundTo(float value, Float16 /*type*/) {
  const uint32_t bits = detail::bitsOf(value);
  const uint32_t sign = (bits >> 16) & 0x8000U;
  const uint32_t magnitude = bits & 0x7fffffffU;
  // Normal: rebias the exponent, round to nearest even; a carry into infinity is right.
  const uint32_t normal = (magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
  // Subnormal: the last place of 0.5f is float16's smallest step.
  const uint32_t subnormal = detail::bitsOf(detail::floatOf(magnitude) + 0.5F) - 0x3f000000U;
  const uint32_t special = magnitude > 0x7f800000U ? 0x7e00U : 0x7c00U;
  uint32_t out = magnitude < 0x38800000U ? subnormal : normal;
  out = magnitude >= 0x47800000U ? special : out;  // 2^16 and more
  return {static_cast<uint16_t>(out | sign)};
}

/// The element as its accumulator has it.
template <typename T>
XMESH_HOST_DEVICE Accumulator<T> widened(T value) {
  if constexpr (kIsHalf<T>) {
    return toFloat(value);
  } else {
    return value;
  }
}

/// The accumulator's value as an element.
template <typename T>
XMESH_HOST_DEVICE T rounded(Accumulator<T> value) {
  if constexpr (kIsHalf<T>) {
    return roundTo(value, T{});
  } else {
    return value;
  }
}

struct Sum {
  template <typename T>
  XMESH_HOST_DEVICE static T apply(T left, T right) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<uint64_t>(left) + static_cast<uint64_t>(right));
    } else if constexpr (IsComplex<T>::value) {
      return {left.real + right.real, left.imag + right.imag};
    } else {
      return left + right;
    }
  }
};
struct Product {
  template <typename T>
  XMESH_HOST_DEVICE static T apply(T left, T right) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<uint64_t>(left) * static_cast<uint64_t>(right));
    } else if constexpr (IsComplex<T>::value) {
      return {left.real * right.real - left.imag * right.imag, left.real * right.imag + left.imag * right.real};
    } else {
      return left * right;
    }
  }
};
struct Min {
  template <typename T>
  XMESH_HOST_DEVICE static T apply(T left, T right) {
    return left < right || left != left ? left : right;  // a NaN on either side wins
  }
};
struct Max {
  template <typename T>
  XMESH_HOST_DEVICE static T apply(T left, T right) {
    return left > right || left != left ? left : right;
  }
};

/// The end of an average; integers have none.
template <typename T>
XMESH_HOST_DEVICE T divided(T value, int64_t divisor) {
  if constexpr (IsComplex<T>::value) {
    return {divided(value.real, divisor), divided(value.imag, divisor)};
  } else if constexpr (std::is_integral_v<T>) {
    return value;
  } else {
    return value / static_cast<T>(divisor);
  }
}

/// Calls `body` with the operation, which T has: complex numbers have no order.
template <typename T, typename Body>
XMESH_HOST_DEVICE void withOperation(core::ReduceOp op, const Body& body) {
  switch (op) {
    case core::ReduceOp::kSum:
    case core::ReduceOp::kAvg:
      return body(Sum{});
    case core::ReduceOp::kProduct:
      return body(Product{});
    case core::ReduceOp::kMin:
      if constexpr (!IsComplex<T>::value) {
        body(Min{});
      }
      return;
    case core::ReduceOp::kMax:
      if constexpr (!IsComplex<T>::value) {
        body(Max{});
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
      return body(Complex<float>{});
    case ElementType::kComplex128:
      return body(Complex<double>{});
  }
}

}  // namespace xmesh::runtime
