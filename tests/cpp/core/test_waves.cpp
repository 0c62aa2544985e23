#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>

#include "core/error.h"
#include "core/resharding/box_refinement.h"
#include "core/resharding/plan_resharding.h"
#include "core/resharding/validate.h"
#include "core/resharding/waves.h"
#include "random_layouts.h"

namespace xmesh::core {
namespace {

using layouts::randomInt;

/// (rank, element) that a tensor's end has, of all its boxes.
std::set<std::pair<int64_t, int64_t>> elementsOf(const TensorSpec& spec) {
  std::set<std::pair<int64_t, int64_t>> out;
  for (const OwnedBox& owned : ownedBoxes(spec)) {
    std::vector<int64_t> elements = {0};
    for (size_t dim = 0; dim < spec.shape.size(); ++dim) {
      std::vector<int64_t> next;
      for (const int64_t prefix : elements) {
        for (int64_t i = owned.box[dim].begin; i < owned.box[dim].end; ++i) {
          next.push_back(prefix * spec.shape[dim] + i);
        }
      }
      elements = std::move(next);
    }
    for (const int64_t rank : owned.ranks) {
      for (const int64_t element : elements) {
        EXPECT_TRUE(out.emplace(rank, element).second);
      }
    }
  }
  return out;
}

TEST(Waves, HaveEveryElementOnceWithinTheBound) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 rng(seed);
    layouts::LayoutOptions options;
    options.num_ranks = 6;
    options.max_elements = 200;
    options.allow_partial = false;
    std::vector<TensorPair> tensors;
    for (int64_t i = randomInt(rng, 1, 6); i > 0; --i) {
      tensors.push_back(layouts::randomPair(rng, options));
      if (randomInt(rng, 0, 1) == 0) {
        layouts::drawBoxes(rng, tensors.back());
      }
    }
    const int64_t max_bytes = randomInt(rng, 16, 600);  // an element has at most 16 bytes
    std::map<int64_t, std::set<std::pair<int64_t, int64_t>>> needed;
    int64_t last = 0;
    const Topology topology = layouts::randomTopology(rng, 6);
    for (const Wave& wave : cutIntoWaves(tensors, max_bytes)) {
      ASSERT_FALSE(wave.tensors.empty());
      ASSERT_EQ(wave.tensors.size(), wave.indices.size());
      std::map<int64_t, int64_t> received;
      std::map<int64_t, int64_t> sent;
      for (size_t i = 0; i < wave.tensors.size(); ++i) {
        ASSERT_LE(last, wave.indices[i]);
        last = wave.indices[i];
        const TensorPair& part = wave.tensors[i];
        const TensorPair& whole = tensors[static_cast<size_t>(last)];
        ASSERT_EQ(part.src.shape, whole.src.shape);
        const auto held = elementsOf(whole.src);
        for (const auto& of_rank : elementsOf(part.src)) {
          ASSERT_TRUE(held.contains(of_rank));
          sent[of_rank.first] += part.src.dtype.item_bytes;
        }
        for (const auto& of_rank : elementsOf(part.dst)) {
          ASSERT_TRUE(needed[last].insert(of_rank).second);
          received[of_rank.first] += part.dst.dtype.item_bytes;
        }
      }
      for (const auto& bytes : {received, sent}) {
        for (const auto& [rank, num_bytes] : bytes) {
          ASSERT_LE(num_bytes, max_bytes);
        }
      }
      const ReshardingPlan plan = planResharding(wave.tensors, topology, parseStrategy("auto"));
      ASSERT_NO_THROW(validatePlan(plan));
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
      ASSERT_EQ(needed[static_cast<int64_t>(i)], elementsOf(tensors[i].dst));
    }
  }
}

TensorPair rowsToRows(int64_t num_rows) {
  const DType dtype = DType::parse("float32");
  return {{{num_rows, 4}, dtype, Mesh({1}, {0}), {Placement::shard(0)}}, {{num_rows, 4}, dtype, Mesh({1}, {1}), {Placement::shard(0)}}};
}

TEST(Waves, AreFilledInOrder) {
  const std::vector<TensorPair> tensors = {rowsToRows(2), rowsToRows(2), rowsToRows(3), rowsToRows(9)};
  const std::vector<Wave> waves = cutIntoWaves(tensors, 64);  // 4 rows
  ASSERT_EQ(waves.size(), 5U);
  EXPECT_EQ(waves[0].indices, (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(waves[0].tensors[1], tensors[1]);  // as it was: on meshes
  EXPECT_EQ(waves[1].indices, (std::vector<int64_t>{2}));
  EXPECT_EQ(waves[2].tensors[0].dst.boxes, (std::vector<OwnedBox>{{{{0, 4}, {0, 4}}, {1}}}));
  EXPECT_EQ(waves[4].tensors[0].src.boxes, (std::vector<OwnedBox>{{{{8, 9}, {0, 4}}, {0}}}));
}

TEST(Waves, CutRowsThatAreTooLong) {
  const std::vector<Wave> waves = cutIntoWaves({rowsToRows(1)}, 12);
  ASSERT_EQ(waves.size(), 2U);
  EXPECT_EQ(waves[0].tensors[0].dst.boxes, (std::vector<OwnedBox>{{{{0, 1}, {0, 3}}, {1}}}));
  EXPECT_EQ(cutIntoWaves({rowsToRows(1)}, 1).size(), 4U);  // an element has four bytes
}

TEST(Waves, RefuseWhatTheyCannotDo) {
  EXPECT_THROW(cutIntoWaves({rowsToRows(1)}, 0), InvalidArgument);
  TensorPair sums = rowsToRows(9);
  sums.src.placements = {Placement::partial(ReduceOp::kSum)};
  EXPECT_THROW(cutIntoWaves({sums}, 64), InvalidArgument);
  EXPECT_EQ(cutIntoWaves({sums}, 1 << 10).size(), 1U);
}

}  // namespace
}  // namespace xmesh::core
