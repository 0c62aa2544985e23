#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "runtime/memory/box_copy.h"
#include "runtime/random_boxes.h"

namespace xmesh::runtime {
namespace {

using namespace boxes;

TEST(BoxCopy, PacksAndUnpacksEveryRangeOfStridedBoxes) {
  std::mt19937_64 rng(1);
  for (int round = 0; round < 2000; ++round) {
    const int64_t item_bytes = kItemBytes[randomInt(rng, 0, 4)];
    const std::vector<int64_t> shape = randomShape(rng);
    OwnedTensor tensor(shape, item_bytes, round % 3 == 0 ? MemoryLayout::kContiguous : MemoryLayout::kRandom, rng);
    fill(tensor, layouts::product(shape), item_bytes, 5);
    const BoxInTensor box = randomBox(rng, shape);
    const StridedBox strided = stridedBox(tensor.tensor(), box.offsets.data(), box.extents.data(), item_bytes);
    ASSERT_EQ(strided.numElements(), box.numElements());
    const int64_t begin = randomInt(rng, 0, box.numElements() - 1);
    const int64_t end = randomInt(rng, begin, box.numElements());
    std::vector<uint8_t> packed(static_cast<size_t>((end - begin) * item_bytes));
    packRange(strided, begin, end, item_bytes, packed.data());
    bool is_one_run = true;
    for (int64_t i = begin; i < end; ++i) {
      const uint8_t* element = tensor.at(elementOf(box, shape, i));
      ASSERT_EQ(std::memcmp(packed.data() + (i - begin) * item_bytes, element, static_cast<size_t>(item_bytes)), 0);
      is_one_run = is_one_run && element == tensor.at(elementOf(box, shape, begin)) + (i - begin) * item_bytes;
    }
    if (begin < end) {
      const std::byte* run = contiguousRun(strided, begin, end, item_bytes);
      ASSERT_EQ(run != nullptr, is_one_run);
      ASSERT_TRUE(run == nullptr || static_cast<const void*>(run) == tensor.at(elementOf(box, shape, begin)));
    }
    OwnedTensor other(shape, item_bytes, MemoryLayout::kRandom, rng);
    unpackRange(packed.data(), stridedBox(other.tensor(), box.offsets.data(), box.extents.data(), item_bytes), begin, end, item_bytes);
    for (int64_t i = 0; i < box.numElements(); ++i) {
      const uint8_t* element = other.at(elementOf(box, shape, i));
      for (int64_t byte = 0; byte < item_bytes; ++byte) {
        ASSERT_EQ(element[byte], i >= begin && i < end ? packed[static_cast<size_t>((i - begin) * item_bytes + byte)] : OwnedTensor::kGap);
      }
    }
    ASSERT_TRUE(other.gapsAreIntact(layouts::product(shape)));
  }
}

TEST(BoxCopy, CopiesBetweenBoxesOfDifferentStrides) {
  std::mt19937_64 rng(2);
  for (int round = 0; round < 2000; ++round) {
    const int64_t item_bytes = kItemBytes[randomInt(rng, 0, 4)];
    const std::vector<int64_t> src_shape = randomShape(rng);
    const BoxInTensor src_box = randomBox(rng, src_shape);
    BoxInTensor dst_box = src_box;
    std::vector<int64_t> dst_shape;
    for (size_t dim = 0; dim < src_shape.size(); ++dim) {
      dst_box.offsets[dim] = randomInt(rng, 0, 2);
      dst_shape.push_back(dst_box.offsets[dim] + dst_box.extents[dim] + randomInt(rng, 0, 1));
    }
    OwnedTensor src(src_shape, item_bytes, round % 3 == 0 ? MemoryLayout::kContiguous : MemoryLayout::kRandom, rng);
    OwnedTensor dst(dst_shape, item_bytes, round % 2 == 0 ? MemoryLayout::kContiguous : MemoryLayout::kRandom, rng);
    fill(src, layouts::product(src_shape), item_bytes, 6);
    const int64_t begin = randomInt(rng, 0, src_box.numElements() - 1);
    const int64_t end = randomInt(rng, begin, src_box.numElements());
    copyRange(stridedBox(src.tensor(), src_box.offsets.data(), src_box.extents.data(), item_bytes),
              stridedBox(dst.tensor(), dst_box.offsets.data(), dst_box.extents.data(), item_bytes), begin, end, item_bytes);
    for (int64_t i = 0; i < src_box.numElements(); ++i) {
      const uint8_t* from = src.at(elementOf(src_box, src_shape, i));
      const uint8_t* to = dst.at(elementOf(dst_box, dst_shape, i));
      for (int64_t byte = 0; byte < item_bytes; ++byte) {
        ASSERT_EQ(to[byte], i >= begin && i < end ? from[byte] : OwnedTensor::kGap);
      }
    }
  }
}

TEST(BoxCopy, ReadsAnExpandedSource) {
  const uint32_t value = 0x01020304;
  const LocalTensor expanded{const_cast<uint32_t*>(&value), {3, 4}, {0, 0}};
  const int64_t offsets[] = {1, 0};
  const int64_t extents[] = {2, 4};
  uint32_t out[8] = {};
  packRange(stridedBox(expanded, offsets, extents, 4), 0, 8, 4, out);
  for (uint32_t element : out) {
    EXPECT_EQ(element, value);
  }
}

TEST(BoxCopy, TreatsAScalarAsOneElement) {
  double value = 1.5;
  double out = 0;
  const StridedBox box = stridedBox({&value, {}, {}}, nullptr, nullptr, 8);
  EXPECT_EQ(box.numElements(), 1);
  EXPECT_EQ(contiguousRun(box, 0, 1, 8), reinterpret_cast<std::byte*>(&value));
  packRange(box, 0, 1, 8, &out);
  EXPECT_EQ(out, 1.5);
}

TEST(BoxCopy, ComputesOffsetsBeyondFourGiB) {
  // 40 GiB of addresses that are never touched.
  auto* base = reinterpret_cast<std::byte*>(uintptr_t{1} << 40);
  const LocalTensor tensor{base, {10, 1 << 20, 1 << 10}, {int64_t{1} << 30, 1 << 10, 1}};
  const int64_t offsets[] = {7, 5, 3};
  const int64_t extents[] = {3, (1 << 20) - 5, 1};
  const StridedBox box = stridedBox(tensor, offsets, extents, 4);
  const int64_t element = 2 * extents[1] + 9;
  const std::byte* run = contiguousRun(box, element, element + 1, 4);
  EXPECT_EQ(run - base, 4 * ((int64_t{9} << 30) + int64_t{14} * 1024 + 3));
  EXPECT_EQ(contiguousRun(box, element, element + 2, 4), nullptr);
  const int64_t zero[] = {0, 0, 0};
  const StridedBox whole = stridedBox(tensor, zero, tensor.shape.data(), 4);
  EXPECT_EQ(whole.num_dims, 1U);
  EXPECT_EQ(contiguousRun(whole, int64_t{9} << 30, int64_t{10} << 30, 4) - base, int64_t{36} << 30);
}

TEST(BoxCopy, MovesDataBeyondFourGiB) {
  constexpr size_t kBytes = size_t{6} << 30;  // addresses only: a few pages of it are ever touched
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const LocalTensor rows{memory, {6, 64}, {int64_t{1} << 30, 1}};
  const int64_t offsets[] = {0, 32};
  const int64_t extents[] = {6, 32};
  const StridedBox box = stridedBox(rows, offsets, extents, 1);
  std::vector<uint8_t> in(6 * 32);
  for (size_t i = 0; i < in.size(); ++i) {
    in[i] = static_cast<uint8_t>(i + 1);
  }
  unpackRange(in.data(), box, 0, 6 * 32, 1);
  EXPECT_EQ(static_cast<uint8_t*>(memory)[(size_t{5} << 30) + 63], 192);
  std::vector<uint8_t> out(6 * 32 - 7);
  packRange(box, 7, 6 * 32, 1, out.data());
  EXPECT_TRUE(std::equal(out.begin(), out.end(), in.begin() + 7));
  munmap(memory, kBytes);
}

}  // namespace
}  // namespace xmesh::runtime
