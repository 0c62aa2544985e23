#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "cuda/emulated_grid.h"
#include "runtime/random_boxes.h"

namespace xmesh::cuda {
namespace {

using namespace boxes;
using core::ReduceOp;
using runtime::ElementType;
using runtime::Reduction;
using runtime::ReductionPart;

constexpr int kNumTypes = 14;

bool isComplex(ElementType type) { return type == ElementType::kComplex64 || type == ElementType::kComplex128; }
bool isInteger(ElementType type) { return type < ElementType::kFloat16; }

Reduction randomReduction(std::mt19937_64& rng) {
  Reduction reduction;
  reduction.type = static_cast<ElementType>(randomInt(rng, 0, kNumTypes - 1));
  constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax};
  reduction.op = kOps[randomInt(rng, 0, isComplex(reduction.type) ? 2 : 4)];
  if (reduction.op == ReduceOp::kAvg) {
    reduction.divisor = isInteger(reduction.type) ? 1 : randomInt(rng, 1, 6);
  }
  return reduction;
}

template <typename T>
void forgetNan(T& value) {
  if constexpr (runtime::IsComplex<T>::value) {
    forgetNan(value.real);
    forgetNan(value.imag);
  } else if (runtime::widened(value) != runtime::widened(value)) {
    value = T{};
  }
}

/// Zero in place of a NaN, of which one is as good as another.
void forgetNan(ElementType type, void* element) {
  runtime::withType(type, [element](auto value) {
    std::memcpy(&value, element, sizeof(value));
    forgetNan(value);
    std::memcpy(element, &value, sizeof(value));
  });
}

/// One random part and where its result is looked for. What it reads is shared by all that are made with the same numbers; what it writes is its own.
struct OnePart {
  OnePart(uint64_t seed, int64_t max_contributions) {
    std::mt19937_64 rng(seed);
    part.reduction = randomReduction(rng);
    const int64_t item_bytes = part.reduction.itemBytes();
    const int64_t sum_bytes = part.reduction.accumulatorItemBytes();
    shape = randomShape(rng);
    const BoxInTensor box = randomBox(rng, shape);
    part.dst_begin = randomInt(rng, 0, box.numElements() - 1);
    part.num_elements = randomInt(rng, 1, box.numElements() - part.dst_begin);
    part.goes_on = randomInt(rng, 0, 3) == 0;
    part.ends = randomInt(rng, 0, 3) != 0;
    accumulator.resize(static_cast<size_t>(part.num_elements * sum_bytes) / sizeof(std::max_align_t) + 1);
    fillBytes(accumulator.data(), part.num_elements * sum_bytes, seed);
    const int64_t count = randomInt(rng, 1, max_contributions);
    for (int64_t c = 0; c < count; ++c) {
      const bool is_sum = randomInt(rng, 0, 3) == 0;
      const int64_t bytes = is_sum ? sum_bytes : item_bytes;
      if (!is_sum && randomInt(rng, 0, 2) == 0) {
        tensors.emplace_back(shape, item_bytes, randomInt(rng, 0, 1) == 0 ? MemoryLayout::kContiguous : MemoryLayout::kRandom, rng);
        fill(tensors.back(), layouts::product(shape), item_bytes, seed + static_cast<uint64_t>(c));
        part.contributions.push_back({boxes::stridedBox(tensors.back(), box, item_bytes), part.dst_begin, false});
        continue;
      }
      received.emplace_back(static_cast<size_t>(part.num_elements * bytes) / sizeof(std::max_align_t) + 1);
      fillBytes(received.back().data(), part.num_elements * bytes, seed + static_cast<uint64_t>(c) + 100);
      part.contributions.push_back({runtime::denseBox(reinterpret_cast<std::byte*>(received.back().data()), part.num_elements, bytes), 0, is_sum});
    }
    dst = std::make_unique<OwnedTensor>(shape, item_bytes, randomInt(rng, 0, 1) == 0 ? MemoryLayout::kContiguous : MemoryLayout::kRandom, rng);
    part.dst = boxes::stridedBox(*dst, box, item_bytes);
    part.accumulator = reinterpret_cast<std::byte*>(accumulator.data());
    std::byte* run = contiguousRun(part.dst, part.dst_begin, part.dst_begin + part.num_elements, item_bytes);
    if (run != nullptr && part.reduction.accumulatesInPlace() && randomInt(rng, 0, 1) == 0) {
      std::memcpy(run, part.accumulator, static_cast<size_t>(part.num_elements * item_bytes));
      part.accumulator = run;
    }
  }

  static void fillBytes(void* data, int64_t num_bytes, uint64_t seed) {
    for (int64_t i = 0; i < num_bytes; ++i) {
      static_cast<uint8_t*>(data)[i] = static_cast<uint8_t>(replay::mix(static_cast<uint64_t>(i) + 1000 * seed));
    }
  }

  void forgetNans() {
    for (int64_t i = 0; i < layouts::product(shape); ++i) {
      forgetNan(part.reduction.type, dst->at(i));
    }
    for (int64_t i = 0; !part.ends && i < part.num_elements; ++i) {
      forgetNan(part.reduction.ofSums().type, part.accumulator + i * part.reduction.accumulatorItemBytes());
    }
  }

  /// Bit for bit.
  bool hasValueOf(OnePart& other) {
    forgetNans();
    other.forgetNans();
    const int64_t bytes = part.num_elements * part.reduction.accumulatorItemBytes();
    return dst->hasBytesOf(*other.dst) && (part.ends || std::memcmp(part.accumulator, other.part.accumulator, static_cast<size_t>(bytes)) == 0);
  }

  std::vector<int64_t> shape;
  std::vector<OwnedTensor> tensors;
  std::vector<std::vector<std::max_align_t>> received;
  std::vector<std::max_align_t> accumulator;
  std::unique_ptr<OwnedTensor> dst;
  ReductionPart part;
};

TEST(ReduceLaunch, GivesTheHostsBits) {
  const runtime::HostKernels host;
  std::mt19937_64 rng(1);
  for (uint64_t round = 1; round <= 3000; ++round) {
    OnePart expected(round, 6);
    OnePart actual(round, 6);
    host.reduce(nullptr, {&expected.part, 1});
    constexpr int kBlockSizes[] = {1, 5, 64, 256};
    reduceInLaunches({&actual.part, 1}, reduceOnGrid(kBlockSizes[randomInt(rng, 0, 3)]));
    ASSERT_TRUE(actual.hasValueOf(expected)) << "round " << round << ", type " << static_cast<int>(actual.part.reduction.type);
  }
}

TEST(ReduceLaunch, TakesManyPartsAtOnceAndManyContributions) {
  const runtime::HostKernels host;
  for (uint64_t round = 0; round < 40; ++round) {
    std::vector<ReductionPart> expected_parts;
    std::vector<ReductionPart> actual_parts;
    std::vector<std::unique_ptr<OnePart>> expected;
    std::vector<std::unique_ptr<OnePart>> actual;
    for (uint64_t i = 0; i < 25; ++i) {
      const int64_t max_contributions = i % 6 == 0 ? 200 : 4;
      expected.push_back(std::make_unique<OnePart>(10'000 + round * 100 + i, max_contributions));
      actual.push_back(std::make_unique<OnePart>(10'000 + round * 100 + i, max_contributions));
      expected_parts.push_back(expected.back()->part);
      actual_parts.push_back(actual.back()->part);
    }
    host.reduce(nullptr, expected_parts);
    reduceInLaunches(actual_parts, reduceOnGrid(64));
    for (size_t i = 0; i < actual.size(); ++i) {
      ASSERT_TRUE(actual[i]->hasValueOf(*expected[i])) << "round " << round << ", part " << i;
    }
  }
}

TEST(ReduceLaunch, TakesVectorsWhereAllOfItLiesInThem) {
  std::vector<std::max_align_t> memory(1024);
  auto* bytes = reinterpret_cast<std::byte*>(memory.data());
  ReductionPart part;
  part.reduction.type = ElementType::kBFloat16;
  part.num_elements = 100;
  part.accumulator = bytes;
  part.ends = true;
  part.contributions = {{runtime::denseBox(bytes + 1024, 100, 2), 0, false}, {runtime::denseBox(bytes + 2048, 100, 4), 0, true}};
  part.dst = runtime::denseBox(bytes + 4096, 100, 2);
  const auto takes_vectors = [&part] {
    bool out = false;
    int num_launches = 0;
    reduceInLaunches({&part, 1}, [&](const ReduceLaunch& launch) {
      out = launch.items[0].takes_vectors;
      ++num_launches;
    });
    EXPECT_EQ(num_launches, 1);
    return out;
  };
  EXPECT_TRUE(takes_vectors());
  part.dst.base += 2;
  EXPECT_FALSE(takes_vectors());
}

}  // namespace
}  // namespace xmesh::cuda
