#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/spec.h"

namespace xmesh::replay {

/// A serial reshard by brute force, with a tiling of its own: explicit lists of global indices instead of intervals.

using Indices = std::vector<int64_t>;
using Bytes = std::vector<uint8_t>;

inline Indices oracleChunk(const Indices& whole, int64_t count, int64_t index) {
  const auto total = static_cast<int64_t>(whole.size());
  const int64_t chunk = (total + count - 1) / count;
  Indices out;
  for (int64_t i = chunk * index; i < std::min(total, chunk * (index + 1)); ++i) {
    out.push_back(whole[static_cast<size_t>(i)]);
  }
  return out;
}

/// Per dim the global indices that the rank at `coord` holds, in local order.
inline std::vector<Indices> oracleTile(const core::TensorSpec& spec, const std::vector<int64_t>& coord) {
  std::vector<Indices> out(spec.shape.size());
  for (size_t dim = 0; dim < spec.shape.size(); ++dim) {
    for (int64_t i = 0; i < spec.shape[dim]; ++i) {
      out[dim].push_back(i);
    }
    for (size_t axis = 0; axis < spec.placements.size(); ++axis) {
      const core::Placement& placement = spec.placements[axis];
      if (!placement.isShard() || static_cast<size_t>(placement.dim) != dim) {
        continue;
      }
      const int64_t factor = placement.kind == core::PlacementKind::kStridedShard ? placement.split_factor : 1;
      Indices next;
      for (int64_t outer = 0; outer < factor; ++outer) {
        const Indices part = oracleChunk(oracleChunk(out[dim], factor, outer), spec.mesh.shape()[axis], coord[axis]);
        next.insert(next.end(), part.begin(), part.end());
      }
      out[dim] = next;
    }
  }
  return out;
}

/// Row-major global element numbers of a tile, in row-major local order.
inline Indices oracleElements(const core::TensorSpec& spec, const std::vector<int64_t>& coord) {
  Indices out = {0};
  const std::vector<Indices> tile = oracleTile(spec, coord);
  for (size_t dim = 0; dim < tile.size(); ++dim) {
    Indices next;
    for (int64_t prefix : out) {
      for (int64_t index : tile[dim]) {
        next.push_back(prefix * spec.shape[dim] + index);
      }
    }
    out = std::move(next);
  }
  return out;
}

/// Which contribution the rank at `coord` holds: its place among the Partial axes, row-major.
inline int64_t oracleContribution(const core::TensorSpec& spec, const std::vector<int64_t>& coord) {
  int64_t index = 0;
  for (size_t axis = 0; axis < coord.size(); ++axis) {
    if (spec.placements[axis].kind == core::PlacementKind::kPartial) {
      index = index * spec.mesh.shape()[axis] + coord[axis];
    }
  }
  return index;
}

inline int64_t oracleNumContributions(const core::TensorSpec& spec) {
  int64_t count = 1;
  for (size_t axis = 0; axis < spec.placements.size(); ++axis) {
    count *= spec.placements[axis].kind == core::PlacementKind::kPartial ? spec.mesh.shape()[axis] : 1;
  }
  return count;
}

/// A local tensor as it must be: its shape, and which elements of the tensor it has, in row-major local order.
struct OracleLocal {
  std::vector<int64_t> shape;
  Indices elements;
  int64_t contribution = 0;
};

/// The local tensors of a rank; an empty one outside a mesh.
inline std::vector<OracleLocal> oracleLocals(const core::TensorSpec& spec, int64_t rank) {
  std::vector<OracleLocal> out;
  for (const core::OwnedBox& owned : spec.boxes) {
    if (std::find(owned.ranks.begin(), owned.ranks.end(), rank) == owned.ranks.end()) {
      continue;
    }
    OracleLocal local{{}, {0}, 0};
    for (size_t dim = 0; dim < owned.box.size(); ++dim) {
      local.shape.push_back(owned.box[dim].end - owned.box[dim].begin);
      Indices next;
      for (const int64_t prefix : local.elements) {
        for (int64_t index = owned.box[dim].begin; index < owned.box[dim].end; ++index) {
          next.push_back(prefix * spec.shape[dim] + index);
        }
      }
      local.elements = std::move(next);
    }
    out.push_back(std::move(local));
  }
  if (spec.isBoxed()) {
    return out;
  }
  const int64_t index = spec.mesh.indexOfRank(rank);
  if (index < 0) {
    return {{{0}, {}, 0}};
  }
  const std::vector<int64_t> coord = spec.mesh.coordOfIndex(index);
  OracleLocal local{{}, oracleElements(spec, coord), oracleContribution(spec, coord)};
  for (const Indices& indices : oracleTile(spec, coord)) {
    local.shape.push_back(static_cast<int64_t>(indices.size()));
  }
  return {std::move(local)};
}

inline uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 31)) * 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 29)) * 0xbf58476d1ce4e5b9ULL;
  return value ^ (value >> 32);
}

/// Rounds to bfloat16 by arithmetic: 8 significant bits, ties to even (values in the normal range).
inline uint16_t oracleBFloat16(double value) {
  int exponent = 0;
  const double mantissa = std::frexp(value, &exponent);
  const auto rounded = static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(mantissa, 8)), exponent - 8));
  uint32_t bits = 0;
  std::memcpy(&bits, &rounded, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

inline double fromBFloat16(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float out = 0;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}

template <typename T>
void putAs(T value, uint8_t* to) {
  std::memcpy(to, &value, sizeof(T));
}

template <typename T>
T getAs(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

/// Bytes of one element of contribution `c` (random, but numbers where numbers are reduced).
inline void oracleValue(const core::TensorSpec& spec, int64_t tensor, int64_t c, int64_t element, uint8_t* to) {
  const uint64_t bits = mix(mix(static_cast<uint64_t>(tensor * 1000 + c) + 77) + static_cast<uint64_t>(element));
  const std::string& name = spec.dtype.name;
  const double real = static_cast<double>(bits >> 40) / (1 << 22) - 2.0;
  const double imag = static_cast<double>(bits & 0xffff) / (1 << 14) - 2.0;
  if (name == "bool") {
    to[0] = bits & 1;
  } else if (name == "float32") {
    putAs(static_cast<float>(real), to);
  } else if (name == "float64") {
    putAs(real, to);
  } else if (name == "float16") {
    putAs(static_cast<_Float16>(real), to);
  } else if (name == "bfloat16") {
    putAs(oracleBFloat16(real), to);
  } else if (name == "complex64") {
    putAs(std::complex<float>(static_cast<float>(real), static_cast<float>(imag)), to);
  } else if (name == "complex128") {
    putAs(std::complex<double>(real, imag), to);
  } else {
    for (int64_t i = 0; i < spec.dtype.item_bytes; ++i) {
      to[i] = static_cast<uint8_t>(mix(bits + static_cast<uint64_t>(i)));
    }
  }
}

template <typename T>
T oracleCombine(core::ReduceOp op, T left, T right) {
  switch (op) {
    case core::ReduceOp::kProduct:
      if constexpr (std::is_integral_v<T>) {
        return static_cast<T>(static_cast<uint64_t>(left) * static_cast<uint64_t>(right));
      } else {
        return left * right;
      }
    case core::ReduceOp::kMin:
    case core::ReduceOp::kMax:
      if constexpr (!std::is_same_v<T, std::complex<float>> && !std::is_same_v<T, std::complex<double>>) {
        if (left != left || right != right) {
          return left != left ? left : right;
        }
        return (op == core::ReduceOp::kMin) == (right < left) ? right : left;
      }
      return left;
    default:
      if constexpr (std::is_integral_v<T>) {
        return static_cast<T>(static_cast<uint64_t>(left) + static_cast<uint64_t>(right));
      } else {
        return left + right;
      }
  }
}

/// The value of an element: contributions combined one after the other in `Acc`, read and written by the callables.
template <typename Acc, typename Read, typename Write>
void oracleReduceAs(const core::TensorSpec& spec, const std::vector<Bytes>& contributions, const Read& read, const Write& write) {
  core::ReduceOp op = core::ReduceOp::kSum;
  int64_t divisor = 1;
  for (size_t axis = 0; axis < spec.placements.size(); ++axis) {
    if (spec.placements[axis].kind == core::PlacementKind::kPartial) {
      op = spec.placements[axis].reduce_op == core::ReduceOp::kAvg ? core::ReduceOp::kSum : spec.placements[axis].reduce_op;
      divisor *= spec.placements[axis].reduce_op == core::ReduceOp::kAvg ? spec.mesh.shape()[axis] : 1;
    }
  }
  Acc value = read(contributions[0].data());
  for (size_t c = 1; c < contributions.size(); ++c) {
    value = oracleCombine<Acc>(op, value, read(contributions[c].data()));
  }
  if constexpr (!std::is_integral_v<Acc>) {
    if (divisor > 1) {
      value /= static_cast<float>(divisor);
    }
  }
  write(value);
}

template <typename T>
void oracleReducePlain(const core::TensorSpec& spec, const std::vector<Bytes>& contributions, uint8_t* to) {
  oracleReduceAs<T>(spec, contributions, getAs<T>, [to](T value) { putAs(value, to); });
}

inline void oracleReduce(const core::TensorSpec& spec, const std::vector<Bytes>& contributions, uint8_t* to) {
  const std::string& name = spec.dtype.name;
  if (contributions.size() == 1) {
    std::memcpy(to, contributions[0].data(), contributions[0].size());
  } else if (name == "float16") {
    oracleReduceAs<float>(
        spec, contributions, [](const uint8_t* from) { return static_cast<float>(getAs<_Float16>(from)); },
        [to](float value) { putAs(static_cast<_Float16>(value), to); });
  } else if (name == "bfloat16") {
    oracleReduceAs<float>(
        spec, contributions, [](const uint8_t* from) { return static_cast<float>(fromBFloat16(getAs<uint16_t>(from))); },
        [to](float value) { putAs(oracleBFloat16(value), to); });
  } else if (name == "float32") {
    oracleReducePlain<float>(spec, contributions, to);
  } else if (name == "float64") {
    oracleReducePlain<double>(spec, contributions, to);
  } else if (name == "complex64") {
    oracleReducePlain<std::complex<float>>(spec, contributions, to);
  } else if (name == "complex128") {
    oracleReducePlain<std::complex<double>>(spec, contributions, to);
  } else if (name == "int8") {
    oracleReducePlain<int8_t>(spec, contributions, to);
  } else if (name == "uint8") {
    oracleReducePlain<uint8_t>(spec, contributions, to);
  } else if (name == "int16") {
    oracleReducePlain<int16_t>(spec, contributions, to);
  } else if (name == "uint16") {
    oracleReducePlain<uint16_t>(spec, contributions, to);
  } else if (name == "int32") {
    oracleReducePlain<int32_t>(spec, contributions, to);
  } else if (name == "uint32") {
    oracleReducePlain<uint32_t>(spec, contributions, to);
  } else if (name == "int64") {
    oracleReducePlain<int64_t>(spec, contributions, to);
  } else {
    oracleReducePlain<uint64_t>(spec, contributions, to);
  }
}

/// One element as a number; floating types only.
inline std::complex<double> oracleNumber(const std::string& dtype, const uint8_t* from) {
  if (dtype == "float16") {
    return static_cast<double>(getAs<_Float16>(from));
  }
  if (dtype == "bfloat16") {
    return fromBFloat16(getAs<uint16_t>(from));
  }
  if (dtype == "float32") {
    return getAs<float>(from);
  }
  if (dtype == "float64") {
    return getAs<double>(from);
  }
  if (dtype == "complex64") {
    return std::complex<double>(getAs<std::complex<float>>(from));
  }
  return getAs<std::complex<double>>(from);
}

/// Whether two elements are equal but for another order of reduction. Contributions are below 2 (complex ones below 3).
inline bool oracleIsClose(const core::TensorSpec& spec, const uint8_t* actual, const uint8_t* expected) {
  const std::string& name = spec.dtype.name;
  if (std::memcmp(actual, expected, static_cast<size_t>(spec.dtype.item_bytes)) == 0) {
    return true;
  }
  if (!name.starts_with("float") && !name.starts_with("bfloat16") && !name.starts_with("complex")) {
    return false;
  }
  const bool is_double = name == "float64" || name == "complex128";
  const double accumulator_unit = std::ldexp(1, is_double ? -52 : -23);
  const double unit = name == "bfloat16" ? std::ldexp(1, -8) : name == "float16" ? std::ldexp(1, -11) : accumulator_unit;
  const auto count = static_cast<double>(oracleNumContributions(spec));
  const std::complex<double> right = oracleNumber(name, expected);
  const double size = std::max(std::abs(right), name == "float16" ? std::ldexp(1, -14) : 0);
  return std::abs(oracleNumber(name, actual) - right) <= 2 * unit * size + accumulator_unit * count * (3 * count + size);
}

/// The whole tensor's bytes after the reshard, row-major.
inline Bytes oracleGlobal(const core::TensorSpec& src, int64_t tensor) {
  const int64_t item_bytes = src.dtype.item_bytes;
  Bytes out(static_cast<size_t>(src.numBytes()));
  std::vector<Bytes> contributions(static_cast<size_t>(oracleNumContributions(src)), Bytes(static_cast<size_t>(item_bytes)));
  for (int64_t element = 0; element < src.numElements(); ++element) {
    for (size_t c = 0; c < contributions.size(); ++c) {
      oracleValue(src, tensor, static_cast<int64_t>(c), element, contributions[c].data());
    }
    oracleReduce(src, contributions, out.data() + element * item_bytes);
  }
  return out;
}

}  // namespace xmesh::replay
