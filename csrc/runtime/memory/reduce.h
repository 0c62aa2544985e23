#pragma once

#include <cstdint>
#include <string>

#include "core/placement.h"
#include "core/spec.h"

namespace xmesh::runtime {

enum class ElementType : uint8_t {
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt8,
  kUInt16,
  kUInt32,
  kUInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kComplex64,
  kComplex128,
};

/// How the contributions to a Partial tensor become its value. Plain value.
/// sum and avg: ((c0 + c1) + c2) + ..., divided by `divisor` at the end; product, min, max likewise in contribution order. float16 and bfloat16
/// accumulate in float32 and are rounded once, to nearest even. Integers wrap. min and max give NaN when any contribution is NaN, as torch does.
struct Reduction {
  ElementType type = ElementType::kFloat32;
  core::ReduceOp op = core::ReduceOp::kSum;
  int64_t divisor = 1;  ///< product of the extents of the axes that are Partial(avg)

  int64_t itemBytes() const;
  /// Bytes of one element of the accumulator: core::DType's.
  int64_t accumulatorItemBytes() const;
  /// The same reduction of partial sums, which have the accumulator's type.
  Reduction ofSums() const;
  /// True when the accumulator has the tensor's own type, so that the first contribution may be received right into it.
  bool accumulatesInPlace() const { return accumulatorItemBytes() == itemBytes(); }
};

/// The reduction of a spec with Partial placements. Throws InvalidArgument when the dtype has no such operation.
Reduction reductionOf(const core::TensorSpec& spec);

/// accumulator[i] = contribution[i]; `accumulator` is aligned and dense, `contribution` dense and of any alignment.
void initAccumulator(const Reduction& reduction, void* accumulator, const void* contribution, int64_t num_elements);
/// accumulator[i] = op(accumulator[i], contribution[i])
void accumulate(const Reduction& reduction, void* accumulator, const void* contribution, int64_t num_elements);
/// Divides if the reduction says so and rounds to the tensor's type: afterwards the accumulator's memory begins with the dense result.
void finishAccumulator(const Reduction& reduction, void* accumulator, int64_t num_elements);

}  // namespace xmesh::runtime
