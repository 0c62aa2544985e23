#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/error.h"
#include "runtime/memory/reduce.h"
#include "runtime/reshard_oracle.h"

namespace xmesh::runtime {
namespace {

using core::Placement;
using core::ReduceOp;

core::TensorSpec specOf(const char* dtype, std::vector<int64_t> mesh_shape, std::vector<Placement> placements) {
  core::TensorSpec spec;
  spec.dtype = core::DType::parse(dtype);
  std::vector<int64_t> ranks;
  int64_t num_ranks = 1;
  for (int64_t extent : mesh_shape) {
    num_ranks *= extent;
  }
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    ranks.push_back(rank);
  }
  spec.mesh = core::Mesh(std::move(mesh_shape), std::move(ranks));
  spec.placements = std::move(placements);
  spec.shape = {7};
  return spec;
}

/// Runs the product's kernels over contributions given as bytes.
std::vector<uint8_t> reduceAll(const Reduction& reduction, const std::vector<std::vector<uint8_t>>& contributions) {
  const auto num_elements = static_cast<int64_t>(contributions[0].size()) / reduction.itemBytes();
  std::vector<std::complex<double>> aligned(static_cast<size_t>(num_elements) + 1);
  initAccumulator(reduction, aligned.data(), contributions[0].data(), num_elements);
  for (size_t c = 1; c < contributions.size(); ++c) {
    accumulate(reduction, aligned.data(), contributions[c].data(), num_elements);
  }
  finishAccumulator(reduction, aligned.data(), num_elements);
  std::vector<uint8_t> out(contributions[0].size());
  std::memcpy(out.data(), aligned.data(), out.size());
  return out;
}

TEST(Reduce, MatchesTheOracleForEveryTypeAndOperation) {
  constexpr const char* kNames[] = {"int8",   "int16",   "int32",    "int64",   "uint8",   "uint16",    "uint32",
                                    "uint64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"};
  constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};
  constexpr int64_t kNumElements = 700;
  int num_checked = 0;
  for (const char* name : kNames) {
    for (ReduceOp op : kOps) {
      core::TensorSpec spec = specOf(name, {5}, {Placement::partial(op)});
      spec.shape = {kNumElements};
      try {
        spec.validate();
      } catch (const core::InvalidArgument&) {
        continue;
      }
      ++num_checked;
      const int64_t item_bytes = spec.dtype.item_bytes;
      std::vector<std::vector<uint8_t>> contributions(5, std::vector<uint8_t>(static_cast<size_t>(kNumElements * item_bytes)));
      for (int64_t c = 0; c < 5; ++c) {
        for (int64_t i = 0; i < kNumElements; ++i) {
          replay::oracleValue(spec, 0, c, i, contributions[static_cast<size_t>(c)].data() + i * item_bytes);
        }
      }
      EXPECT_EQ(reduceAll(reductionOf(spec), contributions), replay::oracleGlobal(spec, 0)) << name << " " << core::reduceOpName(op);
    }
  }
  EXPECT_EQ(num_checked, 8 * 4 + 4 * 5 + 2 * 3);
}

TEST(Reduce, ConvertsEveryFloat16AsTheCompilerDoes) {
  const Reduction sum{ElementType::kFloat16, ReduceOp::kSum, 1};
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    _Float16 reference = 0;
    std::memcpy(&reference, &half, 2);
    float accumulator = 0;
    initAccumulator(sum, &accumulator, &half, 1);
    if (reference != reference) {
      EXPECT_TRUE(std::isnan(accumulator)) << bits;
      continue;
    }
    EXPECT_EQ(accumulator, static_cast<float>(reference)) << bits;
    finishAccumulator(sum, &accumulator, 1);
    uint16_t back = 0;
    std::memcpy(&back, &accumulator, 2);
    EXPECT_EQ(back, half);
  }
}

TEST(Reduce, RoundsToFloat16AndBFloat16ToNearestEven) {
  std::mt19937_64 rng(3);
  const Reduction half{ElementType::kFloat16, ReduceOp::kSum, 1};
  const Reduction brain{ElementType::kBFloat16, ReduceOp::kSum, 1};
  for (int i = 0; i < 300000; ++i) {
    auto bits = static_cast<uint32_t>(rng());
    if (i % 2 == 0) {  // around float16's range, ties included
      bits = (bits & 0x8000f000U) | ((0x32000000U + (bits & 0x0fffffffU) % 0x16000000U) & 0x7ffff000U);
    }
    float value = 0;
    std::memcpy(&value, &bits, 4);
    if (std::isnan(value)) {
      continue;
    }
    float accumulator = value;
    finishAccumulator(half, &accumulator, 1);
    const auto expected = static_cast<_Float16>(value);
    ASSERT_EQ(std::memcmp(&accumulator, &expected, 2), 0) << value;
    if (std::isnormal(value) && std::fabs(value) < 1e38F && std::fabs(value) > 1e-37F) {
      accumulator = value;
      finishAccumulator(brain, &accumulator, 1);
      const uint16_t expected_brain = replay::oracleBFloat16(value);
      ASSERT_EQ(std::memcmp(&accumulator, &expected_brain, 2), 0) << value;
    }
  }
  float not_a_number = std::numeric_limits<float>::quiet_NaN();
  finishAccumulator(brain, &not_a_number, 1);
  uint16_t brain_nan = 0;
  std::memcpy(&brain_nan, &not_a_number, 2);
  EXPECT_TRUE(std::isnan(replay::fromBFloat16(brain_nan)));
}

TEST(Reduce, MinAndMaxKeepNaNWhereverItComes) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    const Reduction reduction{ElementType::kFloat32, op, 1};
    float accumulator[] = {nan, 1.0F, 2.0F};
    const float contribution[] = {1.0F, nan, 3.0F};
    accumulate(reduction, accumulator, contribution, 3);
    EXPECT_TRUE(std::isnan(accumulator[0]));
    EXPECT_TRUE(std::isnan(accumulator[1]));
    EXPECT_EQ(accumulator[2], op == ReduceOp::kMin ? 2.0F : 3.0F);
  }
}

TEST(Reduce, RoundsHalfPrecisionSumsOnce) {
  // 256 + 1 is not representable in bfloat16; rounding after each step would lose every 1.
  const Reduction reduction{ElementType::kBFloat16, ReduceOp::kSum, 1};
  std::vector<std::vector<uint8_t>> contributions;
  for (double value : {256.0, 1.0, 1.0, 1.0, 1.0}) {
    contributions.emplace_back(2);
    replay::putAs(replay::oracleBFloat16(value), contributions.back().data());
  }
  EXPECT_EQ(replay::fromBFloat16(replay::getAs<uint16_t>(reduceAll(reduction, contributions).data())), 260.0);
}

TEST(Reduce, DividesByTheExtentsOfAvgAxesOnly) {
  const core::TensorSpec mixed =
      specOf("float32", {2, 3, 4}, {Placement::partial(ReduceOp::kSum), Placement::partial(ReduceOp::kAvg), Placement::replicate()});
  EXPECT_EQ(reductionOf(mixed).divisor, 3);
  EXPECT_EQ(reductionOf(mixed).op, ReduceOp::kAvg);
  const core::TensorSpec twice = specOf("float32", {2, 3}, {Placement::partial(ReduceOp::kAvg), Placement::partial(ReduceOp::kAvg)});
  EXPECT_EQ(reductionOf(twice).divisor, 6);
  EXPECT_EQ(reductionOf(specOf("int8", {4}, {Placement::partial(ReduceOp::kMax)})).op, ReduceOp::kMax);
  EXPECT_THROW(reductionOf(specOf("bool", {4}, {Placement::partial(ReduceOp::kSum)})), core::InvalidArgument);
}

}  // namespace
}  // namespace xmesh::runtime
