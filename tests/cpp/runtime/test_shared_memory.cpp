#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <set>

#include "runtime/memory/shared_memory.h"

namespace xmesh::runtime {
namespace {

std::array<std::byte, 1 << 16> g_memory;

TensorMemory memory(std::vector<int64_t> shape, std::vector<int64_t> strides, int64_t offset_bytes = 0, int64_t item_bytes = 4,
                    bool is_written = true) {
  return {{g_memory.data() + offset_bytes, std::move(shape), std::move(strides)}, item_bytes, 0, is_written};
}

/// Where each element begins, one by one.
std::vector<int64_t> placesOf(const TensorMemory& one) {
  std::vector<int64_t> out{static_cast<const std::byte*>(one.tensor.data) - g_memory.data()};
  for (size_t dim = 0; dim < one.tensor.shape.size(); ++dim) {
    std::vector<int64_t> more;
    for (const int64_t place : out) {
      for (int64_t i = 0; i < one.tensor.shape[dim]; ++i) {
        more.push_back(place + i * one.tensor.strides[dim] * one.item_bytes);
      }
    }
    out = std::move(more);
  }
  return out;
}

bool sharesWithItself(const TensorMemory& one) {
  const std::vector<int64_t> places = placesOf(one);
  return std::set<int64_t>(places.begin(), places.end()).size() < places.size();
}

bool shares(const TensorMemory& one, const TensorMemory& other) {
  std::set<int64_t> bytes;
  for (const int64_t place : placesOf(one)) {
    for (int64_t i = 0; i < one.item_bytes; ++i) {
      bytes.insert(place + i);
    }
  }
  const std::vector<int64_t> places = placesOf(other);
  return std::any_of(places.begin(), places.end(), [&](int64_t place) {
    const auto next = bytes.lower_bound(place);
    return next != bytes.end() && *next < place + other.item_bytes;
  });
}

TensorMemory drawn(std::mt19937& random) {
  const auto below = [&](int64_t end) { return static_cast<int64_t>(random() % static_cast<uint64_t>(end)); };
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  for (int64_t dim = below(5); dim > 0; --dim) {
    shape.push_back(random() % 20 == 0 ? 0 : 1 + below(4));
    strides.push_back(below(14));
  }
  const int64_t item_bytes = int64_t{1} << below(4);
  return memory(std::move(shape), std::move(strides), below(40), item_bytes);
}

TEST(SharedMemory, IsFoundByStridesAsByEachElement) {
  std::mt19937 random(7);
  std::array<int, 2> with_itself{};
  std::array<int, 2> with_another{};
  for (int i = 0; i < 20'000; ++i) {
    const TensorMemory one = drawn(random);
    const TensorMemory other = drawn(random);
    ASSERT_EQ(overlapsItself(one.tensor), sharesWithItself(one));
    ASSERT_EQ(overlap(one, other), shares(one, other));
    ASSERT_EQ(overlap(other, one), shares(one, other));
    ++with_itself.at(sharesWithItself(one) ? 1 : 0);
    ++with_another.at(shares(one, other) ? 1 : 0);
  }
  for (const int count : {with_itself[0], with_itself[1], with_another[0], with_another[1]}) {
    EXPECT_GT(count, 2000);
  }
}

TEST(SharedMemory, OfViewsOfOneTensor) {
  const TensorMemory left = memory({64, 3}, {16, 1});
  const TensorMemory middle = memory({64, 5}, {16, 1}, 3 * 4);
  const TensorMemory right = memory({8, 64}, {1, 16}, 8 * 4);  // transposed
  EXPECT_EQ(findSharedMemory({left, middle, right}), std::nullopt);
  EXPECT_EQ(findSharedMemory({left, middle, right, left}), std::pair(size_t{0}, size_t{3}));
  EXPECT_EQ(findSharedMemory({left, memory({1}, {1}, 63 * 64 + 8)}), std::pair(size_t{0}, size_t{1}));
  EXPECT_EQ(findSharedMemory({memory({3, 4}, {0, 1})}), std::pair(size_t{0}, size_t{0})) << "expanded";
  EXPECT_EQ(findSharedMemory({memory({3, 2}, {1, 1})}), std::pair(size_t{0}, size_t{0})) << "windows";
  EXPECT_EQ(findSharedMemory({memory({1, 4}, {0, 1})}), std::nullopt);
  EXPECT_EQ(findSharedMemory({memory({0, 4}, {0, 1}), left}), std::nullopt);
  EXPECT_EQ(findSharedMemory({memory({2}, {1}, 0, 8), memory({4}, {1}, 16, 4)}), std::nullopt);
  EXPECT_EQ(findSharedMemory({memory({2}, {1}, 0, 8), memory({4}, {1}, 15, 1)}), std::pair(size_t{0}, size_t{1}));
}

TEST(SharedMemory, OfWhatIsReadCountsBesideWhatIsWritten) {
  TensorMemory read = memory({3, 4}, {0, 1}, 0, 4, false);
  EXPECT_EQ(findSharedMemory({read, read}), std::nullopt);
  EXPECT_EQ(findSharedMemory({memory({1}, {1}, 12), read}), std::pair(size_t{0}, size_t{1}));
  read.device = 1;
  EXPECT_EQ(findSharedMemory({memory({1}, {1}, 12), read}), std::nullopt);
}

TEST(SharedMemory, OfOddStridesIsDecidedInTime) {
  const int64_t count = 100'000;
  EXPECT_TRUE(overlap(memory({count, 3}, {1001, 7}), memory({count, 3}, {1003, 11}, 4)));
  std::vector<TensorMemory> columns;
  for (int64_t i = 0; i < 500; ++i) {
    columns.push_back(memory({count, 2}, {1000, 1}, 8 * i));
  }
  EXPECT_EQ(findSharedMemory(columns), std::nullopt);
}

}  // namespace
}  // namespace xmesh::runtime
