#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
#include <random>
#include <vector>

#include "cuda/emulated_grid.h"
#include "runtime/memory/box_copy.h"
#include "runtime/random_boxes.h"

namespace xmesh::cuda {
namespace {

using namespace boxes;
using runtime::BoxPair;
using runtime::PackedRange;
using runtime::StridedBox;

/// Blocks of odd sizes too, and fewer of them than an item would have.
LaunchCopy randomGrid(std::mt19937_64& rng, int* num_launches = nullptr) {
  constexpr int kBlockSizes[] = {1, 7, 32, 96, 256};
  return copyOnGrid(kBlockSizes[randomInt(rng, 0, 4)], static_cast<int>(randomInt(rng, 1, 3)), num_launches);
}

MemoryLayout randomLayout(std::mt19937_64& rng) { return randomInt(rng, 0, 2) == 0 ? MemoryLayout::kContiguous : MemoryLayout::kRandom; }

/// Many ranges of boxes of one tensor, with dense memory of any alignment.
struct Ranges {
  Ranges(std::mt19937_64& rng, int64_t count) : item_bytes(kItemBytes[randomInt(rng, 0, 4)]), shape(randomShape(rng)) {
    for (int64_t i = 0; i < count; ++i) {
      boxes.push_back(randomBox(rng, shape));
      const int64_t begin = randomInt(rng, 0, boxes.back().numElements() - 1);
      ranges.push_back({{}, begin, randomInt(rng, begin, boxes.back().numElements()), item_bytes, nullptr});
      shifts.push_back(randomInt(rng, 0, 1) == 0 ? 0 : randomInt(rng, 1, 15));
      dense.emplace_back(static_cast<size_t>((ranges.back().end - begin) * item_bytes + 16), uint8_t{0});
    }
  }

  const std::vector<PackedRange>& of(const OwnedTensor& tensor) {
    for (size_t i = 0; i < ranges.size(); ++i) {
      ranges[i].box = boxes::stridedBox(tensor, boxes[i], item_bytes);
      ranges[i].dense = reinterpret_cast<std::byte*>(dense[i].data()) + shifts[i];
    }
    return ranges;
  }

  int64_t item_bytes;
  std::vector<int64_t> shape;
  std::vector<BoxInTensor> boxes;
  std::vector<PackedRange> ranges;
  std::vector<int64_t> shifts;
  std::vector<std::vector<uint8_t>> dense;
};

TEST(CopyLaunch, PacksWhatTheHostPacks) {
  std::mt19937_64 rng(1);
  for (int round = 0; round < 600; ++round) {
    Ranges ranges(rng, randomInt(rng, 1, round % 20 == 0 ? 100 : 4));
    OwnedTensor tensor(ranges.shape, ranges.item_bytes, randomLayout(rng), rng);
    fill(tensor, layouts::product(ranges.shape), ranges.item_bytes, 7);
    packInLaunches(ranges.of(tensor), randomGrid(rng));
    for (size_t i = 0; i < ranges.ranges.size(); ++i) {
      const PackedRange& range = ranges.ranges[i];
      std::vector<uint8_t> expected(ranges.dense[i].size(), 0);
      packRange(range.box, range.begin, range.end, range.item_bytes, expected.data() + ranges.shifts[i]);
      ASSERT_EQ(ranges.dense[i], expected) << "round " << round << ", range " << i;
    }
  }
}

TEST(CopyLaunch, UnpacksWhatTheHostUnpacks) {
  std::mt19937_64 rng(2);
  for (int round = 0; round < 1000; ++round) {
    Ranges ranges(rng, 1);
    const MemoryLayout layout = randomLayout(rng);
    std::mt19937_64 same = rng;
    OwnedTensor tensor(ranges.shape, ranges.item_bytes, layout, rng);
    OwnedTensor expected(ranges.shape, ranges.item_bytes, layout, same);
    for (size_t i = 0; i < ranges.dense[0].size(); ++i) {
      ranges.dense[0][i] = static_cast<uint8_t>(replay::mix(i));
    }
    const PackedRange& range = ranges.of(expected)[0];
    unpackRange(range.dense, range.box, range.begin, range.end, range.item_bytes);
    unpackInLaunches(ranges.of(tensor), randomGrid(rng));
    ASSERT_TRUE(tensor.hasBytesOf(expected)) << "round " << round;
  }
}

TEST(CopyLaunch, CopiesWhatTheHostCopies) {
  std::mt19937_64 rng(3);
  for (int round = 0; round < 1000; ++round) {
    const int64_t item_bytes = kItemBytes[randomInt(rng, 0, 4)];
    const std::vector<int64_t> src_shape = randomShape(rng);
    const BoxInTensor src_box = randomBox(rng, src_shape);
    BoxInTensor dst_box = src_box;
    std::vector<int64_t> dst_shape;
    for (size_t dim = 0; dim < src_shape.size(); ++dim) {
      dst_box.offsets[dim] = randomInt(rng, 0, 2);
      dst_shape.push_back(dst_box.offsets[dim] + dst_box.extents[dim] + randomInt(rng, 0, 1));
    }
    OwnedTensor src(src_shape, item_bytes, randomLayout(rng), rng);
    fill(src, layouts::product(src_shape), item_bytes, 8);
    const MemoryLayout layout = randomLayout(rng);
    std::mt19937_64 same = rng;
    OwnedTensor dst(dst_shape, item_bytes, layout, rng);
    OwnedTensor expected(dst_shape, item_bytes, layout, same);
    const StridedBox from = boxes::stridedBox(src, src_box, item_bytes);
    copyRange(from, boxes::stridedBox(expected, dst_box, item_bytes), 0, src_box.numElements(), item_bytes);
    const BoxPair pair{from, boxes::stridedBox(dst, dst_box, item_bytes), src_box.numElements(), item_bytes};
    copyInLaunches({&pair, 1}, randomGrid(rng));
    ASSERT_TRUE(dst.hasBytesOf(expected)) << "round " << round;
  }
}

/// A part of the columns of 64 rows of 1000 floats, `begin` elements into it.
CopyLaunch launchOf(int64_t first_column, int64_t num_columns, int64_t begin, int64_t end, int64_t pitch = 1000) {
  static std::vector<std::max_align_t> memory(64 * 1024 * 4 / sizeof(std::max_align_t));
  static std::vector<std::max_align_t> dense(memory.size());
  const runtime::LocalTensor tensor{memory.data(), {64, pitch}, {pitch, 1}};
  const int64_t offsets[] = {0, first_column};
  const int64_t extents[] = {64, num_columns};
  const PackedRange range{runtime::stridedBox(tensor, offsets, extents, 4), begin, end, 4, reinterpret_cast<std::byte*>(dense.data())};
  CopyLaunch out;
  packInLaunches({&range, 1}, [&out](const CopyLaunch& launch) { out = launch; });
  return out;
}

TEST(CopyLaunch, TakesTheLongestWordsThatFit) {
  EXPECT_EQ(launchOf(0, 500, 0, 32000).items[0].word_bytes, 16);
  EXPECT_EQ(launchOf(2, 500, 0, 32000).items[0].word_bytes, 8) << "rows begin between words";
  EXPECT_EQ(launchOf(0, 498, 0, 498 * 64).items[0].word_bytes, 8) << "rows end between words";
  EXPECT_EQ(launchOf(0, 500, 0, 32000, 1001).items[0].word_bytes, 4) << "rows are no words apart";
  EXPECT_EQ(launchOf(0, 500, 3, 32000).items[0].word_bytes, 4) << "the range begins between words";
  const CopyLaunch rest = launchOf(0, 500, 0, 31999);
  ASSERT_EQ(rest.num_items, 2);
  EXPECT_EQ(rest.items[0].word_bytes, 16);
  EXPECT_EQ(rest.items[1].word_bytes, 4);
  EXPECT_EQ(rest.items[1].num_words, 3);
}

TEST(CopyLaunch, TakesManyBoxesAtOnce) {
  std::mt19937_64 rng(4);
  std::vector<uint8_t> memory(64 * 64);
  std::vector<uint8_t> dense(40 * 32 * 16);
  const runtime::LocalTensor tensor{memory.data(), {64, 64}, {64, 1}};
  std::vector<PackedRange> ranges;
  for (int64_t i = 0; i < 40; ++i) {
    const int64_t offsets[] = {i / 2, 16 * (i % 2)};
    const int64_t extents[] = {16, 32};
    ranges.push_back({runtime::stridedBox(tensor, offsets, extents, 1), 0, 512, 1, reinterpret_cast<std::byte*>(dense.data()) + i * 512});
  }
  int num_launches = 0;
  packInLaunches(ranges, copyOnGrid(kThreadsPerBlock, 1, &num_launches));
  EXPECT_EQ(num_launches, 2);
  packInLaunches({}, copyOnGrid(kThreadsPerBlock, 1, &num_launches));
  EXPECT_EQ(num_launches, 2);
}

TEST(CopyLaunch, MovesDataBeyondFourGiB) {
  constexpr size_t kBytes = size_t{6} << 30;  // addresses only: a few pages of it are ever touched
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const runtime::LocalTensor rows{memory, {6, 65}, {int64_t{1} << 30, 1}};
  const int64_t offsets[] = {0, 32};
  const int64_t extents[] = {6, 32};
  std::vector<uint8_t> in(6 * 32);
  for (size_t i = 0; i < in.size(); ++i) {
    in[i] = static_cast<uint8_t>(i + 1);
  }
  const PackedRange range{runtime::stridedBox(rows, offsets, extents, 1), 0, 6 * 32, 1, reinterpret_cast<std::byte*>(in.data())};
  unpackInLaunches({&range, 1}, copyOnGrid(kThreadsPerBlock, 1));
  EXPECT_EQ(static_cast<uint8_t*>(memory)[(size_t{5} << 30) + 63], 192);

  // The last elements of a box of 6 G elements, whose numbers need more than 32 bits.
  const runtime::LocalTensor all{memory, {3, 1 << 30}, {int64_t{1} << 31, 2}};
  const int64_t zero[] = {0, 0};
  static_cast<uint8_t*>(memory)[(size_t{2} << 31) + 2 * ((size_t{1} << 30) - 1)] = 77;
  uint8_t out[2] = {};
  const int64_t end = int64_t{3} << 30;
  const PackedRange last{runtime::stridedBox(all, zero, all.shape.data(), 1), end - 2, end, 1, reinterpret_cast<std::byte*>(out)};
  packInLaunches({&last, 1}, copyOnGrid(kThreadsPerBlock, 1));
  EXPECT_EQ(out[1], 77);

  // The first of a box whose inner dim needs more than 32 bits.
  const runtime::LocalTensor columns{memory, {2, int64_t{4} << 30}, {1, 2}};
  static_cast<uint8_t*>(memory)[2] = 78;
  const runtime::StridedBox box = runtime::stridedBox(columns, zero, columns.shape.data(), 1);
  ASSERT_EQ(box.num_dims, 2U);
  const PackedRange first{box, 0, 2, 1, reinterpret_cast<std::byte*>(out)};
  packInLaunches({&first, 1}, copyOnGrid(kThreadsPerBlock, 1));
  EXPECT_EQ(out[1], 78);
  munmap(memory, kBytes);
}

}  // namespace
}  // namespace xmesh::cuda
