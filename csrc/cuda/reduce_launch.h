#pragma once

#include <cstdint>

#include "cuda/grid.h"
#include "runtime/memory/element_math.h"

/// Parts of reductions, many in one launch: what the kernel is given, and what each of its threads does. The arithmetic is the host's own.
namespace xmesh::cuda {

struct OperandDim {
  int64_t extent = 0;
  int64_t bytes = 0;
};

/// Elements of a contribution or of the destination, from number `first` of a box on; without dims they are dense.
struct Operand {
  uint64_t address = 0;
  int64_t first = 0;
  int16_t first_dim = 0;
  int16_t num_dims = 0;
  int16_t is_small = 0;  ///< see fitsIn32Bits
  int16_t is_sum = 0;    ///< the elements have the accumulator's type
};

/// A ReductionPart.
struct ReduceItem {
  uint64_t accumulator = 0;
  int64_t num_elements = 0;
  int64_t divisor = 1;
  BlockRange blocks;
  int16_t first_operand = 0;  ///< contributions, then the destination of a part that ends
  int16_t num_contributions = 0;
  core::ReduceOp op = core::ReduceOp::kSum;
  bool goes_on = false;
  bool ends = false;
  bool takes_vectors = false;  ///< every operand has kVectorBytes of elements at aligned addresses, one behind another
};

inline constexpr int kVectorBytes = 16;

/// The parameter of one launch, by value: no more than 4 KiB fit on every device.
struct ReduceLaunch {
  static constexpr int kMaxItems = 20;
  static constexpr int kMaxOperands = 64;
  static constexpr int kMaxDims = 80;

  ReduceItem items[kMaxItems];
  Operand operands[kMaxOperands];
  OperandDim dims[kMaxDims];
  int32_t num_items = 0;
  int32_t num_operands = 0;
  int32_t num_dims = 0;
  int32_t num_blocks = 0;
  runtime::ElementType type = runtime::ElementType::kFloat32;  ///< of all items
};
static_assert(sizeof(ReduceLaunch) <= 4096);

XMESH_HOST_DEVICE XMESH_NOT_INLINE inline uint64_t stridedAddress(const Operand& operand, const OperandDim* dims, int64_t element) {
  uint64_t address = operand.address;
  const auto add = [&address](const OperandDim& dim, int64_t coordinate) { address += static_cast<uint64_t>(coordinate * dim.bytes); };
  if (operand.is_small != 0) {
    visitCoordinates(dims, operand.num_dims, static_cast<uint32_t>(operand.first + element), add);
  } else {
    visitCoordinates(dims, operand.num_dims, static_cast<uint64_t>(operand.first + element), add);
  }
  return address;
}

XMESH_HOST_DEVICE inline uint64_t addressOf(const Operand& operand, const OperandDim* all_dims, int64_t element, int64_t item_bytes) {
  return operand.num_dims == 0 ? operand.address + static_cast<uint64_t>(element * item_bytes)
                               : stridedAddress(operand, all_dims + operand.first_dim, element);
}

/// kCount elements one behind another.
template <typename T, int kCount>
struct Elements {
  static constexpr int kAlignment = kCount == 1 ? alignof(T) : kVectorBytes;
  T values[kCount];
};

template <typename T, int kCount>
XMESH_HOST_DEVICE Elements<runtime::Accumulator<T>, kCount> contributionAt(const ReduceLaunch& launch, const Operand& operand, int64_t element) {
  using Sums = Elements<runtime::Accumulator<T>, kCount>;
  using Own = Elements<T, kCount>;
  if constexpr (!runtime::kIsHalf<T>) {
    return loadAligned<Own::kAlignment, Sums>(addressOf(operand, launch.dims, element, sizeof(T)));
  } else {
    if (operand.is_sum != 0) {
      return loadAligned<Sums::kAlignment, Sums>(addressOf(operand, launch.dims, element, sizeof(float)));
    }
    const Own own = loadAligned<Own::kAlignment, Own>(addressOf(operand, launch.dims, element, sizeof(T)));
    Sums out;
    for (int i = 0; i < kCount; ++i) {
      out.values[i] = runtime::widened(own.values[i]);
    }
    return out;
  }
}

template <typename T, int kCount>
XMESH_HOST_DEVICE void reduceElements(const ReduceLaunch& launch, const ReduceItem& item, int64_t element) {
  using Sum = runtime::Accumulator<T>;
  using Sums = Elements<Sum, kCount>;
  const Operand* operands = launch.operands + item.first_operand;
  const uint64_t accumulator = item.accumulator + static_cast<uint64_t>(element) * sizeof(Sum);
  Sums sums{};
  if (item.goes_on) {
    sums = loadAligned<Sums::kAlignment, Sums>(accumulator);
  }
  for (int c = 0; c < item.num_contributions; ++c) {
    const Sums next = contributionAt<T, kCount>(launch, operands[c], element);
    if (c == 0 && !item.goes_on) {
      sums = next;
      continue;
    }
    runtime::withOperation<Sum>(item.op, [&](auto op) {
      for (int i = 0; i < kCount; ++i) {
        sums.values[i] = op.apply(sums.values[i], next.values[i]);
      }
    });
  }
  if (!item.ends) {
    return storeAligned<Sums::kAlignment>(accumulator, sums);
  }
  Elements<T, kCount> out;
  for (int i = 0; i < kCount; ++i) {
    out.values[i] = runtime::rounded<T>(item.divisor == 1 ? sums.values[i] : runtime::divided(sums.values[i], item.divisor));
  }
  storeAligned<Elements<T, kCount>::kAlignment>(addressOf(operands[item.num_contributions], launch.dims, element, sizeof(T)), out);
}

/// The whole of one thread; T is the launch's type.
template <typename T>
XMESH_HOST_DEVICE void runReduce(const ReduceLaunch& launch, const ThreadIndex& at) {
  constexpr int kCount = kVectorBytes / sizeof(T);
  const ReduceItem& item = itemOf(launch.items, at);
  const Stride stride = strideOf(item.blocks, at);
  const int64_t num_vectors = item.takes_vectors ? item.num_elements / kCount : 0;
  for (int64_t vector = stride.begin; vector < num_vectors; vector += stride.step) {
    reduceElements<T, kCount>(launch, item, vector * kCount);
  }
  for (int64_t element = num_vectors * kCount + stride.begin; element < item.num_elements; element += stride.step) {
    reduceElements<T, 1>(launch, item, element);
  }
}

}  // namespace xmesh::cuda
