#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <string>

#include "core/error.h"
#include "core/resharding/box_refinement.h"
#include "core/resharding/plan_resharding.h"
#include "core/resharding/validate.h"
#include "random_layouts.h"

namespace xmesh::core {
namespace {

using layouts::randomBoxes;
using layouts::randomInt;

std::vector<int64_t> elementsOf(const std::vector<int64_t>& shape, const Box& box) {
  std::vector<int64_t> out = {0};
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    std::vector<int64_t> next;
    for (const int64_t prefix : out) {
      for (int64_t i = box[dim].begin; i < box[dim].end; ++i) {
        next.push_back(prefix * shape[dim] + i);
      }
    }
    out = std::move(next);
  }
  return out;
}

std::map<int64_t, std::set<int64_t>> ownersOfElements(const std::vector<int64_t>& shape, const std::vector<OwnedBox>& boxes) {
  std::map<int64_t, std::set<int64_t>> out;
  for (const OwnedBox& owned : boxes) {
    for (const int64_t element : elementsOf(shape, owned.box)) {
      out[element].insert(owned.ranks.begin(), owned.ranks.end());
    }
  }
  return out;
}

std::string errorOf(const std::vector<int64_t>& shape, const std::vector<OwnedBox>& held, const std::vector<OwnedBox>& needed) {
  try {
    refineBoxes(shape, held, needed);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST(BoxRefinement, GivesEveryElementItsHoldersAndNeeders) {
  for (uint64_t seed = 0; seed < 500; ++seed) {
    std::mt19937_64 rng(seed);
    std::vector<int64_t> shape;
    for (int64_t dims = randomInt(rng, 0, 3); dims > 0; --dims) {
      shape.push_back(randomInt(rng, 1, 7));
    }
    const std::vector<OwnedBox> held = randomBoxes(rng, shape, {0, 1, 2, 3}, true);
    const std::vector<OwnedBox> needed = randomBoxes(rng, shape, {2, 3, 4, 5}, false);
    auto holders = ownersOfElements(shape, held);
    auto needers = ownersOfElements(shape, needed);
    std::set<int64_t> seen;
    int64_t last = -1;
    for (const SharedBox& shared : refineBoxes(shape, held, needed)) {
      const std::vector<int64_t> elements = elementsOf(shape, shared.box);
      ASSERT_LT(last, elements.front());  // by first elements
      last = elements.front();
      for (const int64_t element : elements) {
        ASSERT_TRUE(seen.insert(element).second);
        ASSERT_EQ(std::vector<int64_t>(holders[element].begin(), holders[element].end()), shared.holders);
        ASSERT_EQ(std::vector<int64_t>(needers[element].begin(), needers[element].end()), shared.needers);
      }
    }
    for (const auto& [element, ranks] : needers) {
      ASSERT_EQ(seen.contains(element), !ranks.empty());
    }
  }
}

TEST(BoxRefinement, CutsNoMoreThanItMust) {
  // Two shards of rows to two of columns: four boxes, though another rank, which needs one row, cuts the grid finer.
  const std::vector<OwnedBox> rows = {{{{0, 4}, {0, 8}}, {0}}, {{{4, 8}, {0, 8}}, {1}}};
  std::vector<OwnedBox> columns = {{{{0, 8}, {0, 4}}, {2}}, {{{0, 8}, {4, 8}}, {3}}};
  EXPECT_EQ(refineBoxes({8, 8}, rows, columns).size(), 4U);
  columns.push_back({{{1, 2}, {0, 8}}, {4}});
  // Of rank 0's half: above the row, the row, and below it, by two columns. Of rank 1's: two.
  EXPECT_EQ(refineBoxes({8, 8}, rows, columns).size(), 8U);
}

TEST(BoxRefinement, NamesWhatNobodyHolds) {
  const std::string error = errorOf({8}, {{{{0, 3}}, {0}}, {{{3, 6}}, {}}}, {{{{2, 8}}, {5}}});
  EXPECT_NE(error.find("nobody holds [3:8] for rank 5"), std::string::npos) << error;
  std::vector<OwnedBox> many;
  for (int64_t i = 0; i < 8; ++i) {
    many.push_back({{{2 * i, 2 * i + 1}}, {i}});
  }
  EXPECT_NE(errorOf({16}, {}, many).find("[8:9] for rank 4 and 3 more boxes"), std::string::npos) << errorOf({16}, {}, many);
}

TEST(BoxRefinement, RefusesBoxesOfOneRankThatOverlap) {
  const std::vector<OwnedBox> whole = {{{{0, 8}}, {0}}};
  EXPECT_NE(errorOf({8}, whole, {{{{0, 4}}, {1, 2}}, {{{3, 8}}, {2}}}).find("overlap in [3:4]"), std::string::npos);
}

TEST(BoxRefinement, ALostOwnersBoxesComeFromWhoElseHasThem) {
  const Mesh source({2, 2}, {0, 1, 2, 3});
  const TensorSpec src{{8, 4}, DType::parse("float32"), source, {Placement::replicate(), Placement::shard(0)}};
  const TensorSpec dst{{8, 4}, DType::parse("float32"), Mesh({2}, {4, 5}), {Placement::shard(1)}};
  Topology topology({{0, 0}, {1, 0}, {2, 1}, {3, 1}, {4, 2}, {5, 2}}, LinkModel{});
  const ReshardingPlan plan = planResharding({{withoutRanks(src, {0}), dst}}, topology, parseStrategy("auto"));
  EXPECT_NO_THROW(validatePlan(plan));
  for (const Message& message : plan.messages) {
    EXPECT_NE(message.src_rank, 0);
  }
  EXPECT_EQ(plan.participants(), (std::vector<int64_t>{1, 2, 3, 4, 5}));
  try {
    planResharding({{withoutRanks(src, {0, 2}), dst}}, topology, parseStrategy("auto"));
    FAIL() << "both owners of the upper half are gone";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("tensor 0: nobody holds [0:4, 0:2] for rank 4"), std::string::npos) << error.what();
  }
}

TEST(BoxRefinement, MeshesAndTheirBoxesMakeTheSameTasks) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 rng(seed);
    layouts::LayoutOptions options;
    options.allow_partial = false;
    options.allow_zero_size = false;
    const TensorPair pair = layouts::randomPair(rng, options);
    const Topology topology = layouts::randomTopology(rng, 12);
    const ReshardingPlan meshes = planResharding({pair}, topology, parseStrategy("send_recv"));
    const ReshardingPlan boxes = planResharding({{withoutRanks(pair.src, {}), withoutRanks(pair.dst, {})}}, topology, parseStrategy("send_recv"));
    ASSERT_EQ(boxes.lower_bound_bytes, meshes.lower_bound_bytes);
    ASSERT_EQ(boxes.tasks.size(), meshes.tasks.size()) << pair.src.str() << " -> " << pair.dst.str();
    for (size_t i = 0; i < boxes.tasks.size(); ++i) {
      ASSERT_EQ(boxes.tasks[i].box, meshes.tasks[i].box);
      ASSERT_EQ(boxes.holders[static_cast<size_t>(boxes.tasks[i].holders)], meshes.holders[static_cast<size_t>(meshes.tasks[i].holders)]);
      ASSERT_EQ(boxes.needers[static_cast<size_t>(boxes.tasks[i].needers)], meshes.needers[static_cast<size_t>(meshes.tasks[i].needers)]);
    }
  }
}

}  // namespace
}  // namespace xmesh::core
