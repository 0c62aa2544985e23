#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>

#include "core/error.h"
#include "core/resharding/plan_resharding.h"
#include "core/resharding/validate.h"
#include "core/weights/match.h"
#include "random_layouts.h"

namespace xmesh::core {
namespace {

using layouts::randomInt;
using Members = std::map<int64_t, Manifest>;

DType type(const char* name) { return DType::parse(name); }

std::string errorOf(const Members& sources, const Members& replicas) {
  try {
    match(sources, replicas);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

HeldTensor held(const std::string& name, std::vector<int64_t> shape, std::vector<Box> boxes) {
  return {name, std::move(shape), type("float32"), std::move(boxes)};
}

Box randomBox(std::mt19937_64& rng, const std::vector<int64_t>& shape) {
  Box out;
  for (const int64_t extent : shape) {
    const int64_t begin = randomInt(rng, 0, extent - 1);
    out.push_back({begin, randomInt(rng, begin + 1, extent)});
  }
  return out;
}

TEST(Match, BringsEveryNeededBoxToItsMember) {
  for (uint64_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 rng(seed);
    Members sources;
    Members replicas;
    const std::vector<std::string> names = {"embed", "layer.q", "layer.k", "norm"};
    std::map<std::string, std::vector<int64_t>> shapes;
    for (const std::string& name : names) {
      for (int64_t dims = randomInt(rng, 1, 3); dims > 0; --dims) {
        shapes[name].push_back(randomInt(rng, 1, 6));
      }
      for (const OwnedBox& owned : layouts::randomBoxes(rng, shapes[name], {0, 1, 2}, true)) {
        for (const int64_t member : owned.ranks) {
          std::vector<HeldTensor>& all = sources[member].held;
          auto mine = std::find_if(all.begin(), all.end(), [&](const HeldTensor& one) { return one.name == name; });
          if (mine == all.end()) {
            mine = all.insert(all.begin(), held(name, shapes[name], {}));  // in any order
          }
          mine->boxes.push_back(owned.box);
        }
      }
    }
    for (const int64_t member : {5, 6, 9}) {
      for (int64_t count = randomInt(rng, 0, 8); count > 0; --count) {
        const std::string& name = names[static_cast<size_t>(randomInt(rng, 0, 3))];
        replicas[member].needed.push_back({name, randomBox(rng, shapes[name]), type(randomInt(rng, 0, 2) == 0 ? "bfloat16" : "float32")});
      }
    }
    const Match found = match(sources, replicas);
    ASSERT_TRUE(std::is_sorted(found.names.begin(), found.names.end()));
    if (!found.tensors.empty()) {
      std::map<int64_t, int64_t> hosts;
      for (int64_t rank = 0; rank < 10; ++rank) {
        hosts[rank] = rank / 3;
      }
      ASSERT_NO_THROW(validatePlan(planResharding(found.tensors, Topology(hosts, LinkModel{}), parseStrategy("auto"))));
    }
    for (const auto& [member, manifest] : replicas) {
      std::multiset<int64_t> come;
      const auto received = found.received.find(member);
      size_t next = 0;
      for (size_t tensor = 0; tensor < found.tensors.size(); ++tensor) {
        for (const OwnedBox& owned : found.tensors[tensor].dst.boxes) {
          if (std::find(owned.ranks.begin(), owned.ranks.end(), member) == owned.ranks.end()) {
            continue;
          }
          const MatchedBox& matched = received->second.at(next++);
          ASSERT_EQ(matched.tensor, static_cast<int64_t>(tensor));
          const NeededBox& needed = manifest.needed.at(static_cast<size_t>(matched.index));
          ASSERT_EQ(needed.source, found.names[tensor]);
          ASSERT_EQ(needed.box, owned.box);
          ASSERT_EQ(needed.dtype, found.tensors[tensor].dst.dtype);
          come.insert(matched.index);
        }
      }
      if (const auto copied = found.copied.find(member); copied != found.copied.end()) {
        for (const auto& [from, to] : copied->second) {
          ASSERT_TRUE(come.contains(from));
          ASSERT_EQ(manifest.needed.at(static_cast<size_t>(from)), manifest.needed.at(static_cast<size_t>(to)));
          come.insert(to);
        }
      }
      ASSERT_EQ(come.size(), manifest.needed.size());
      ASSERT_EQ(std::set<int64_t>(come.begin(), come.end()).size(), manifest.needed.size());
    }
    for (const auto& [member, manifest] : sources) {
      size_t next = 0;
      for (size_t tensor = 0; tensor < found.tensors.size(); ++tensor) {
        const auto mine =
            std::find_if(manifest.held.begin(), manifest.held.end(), [&](const HeldTensor& one) { return one.name == found.names[tensor]; });
        for (const OwnedBox& owned : found.tensors[tensor].src.boxes) {
          if (std::find(owned.ranks.begin(), owned.ranks.end(), member) != owned.ranks.end()) {
            const MatchedBox& matched = found.sent.at(member).at(next++);
            ASSERT_EQ(matched.tensor, static_cast<int64_t>(tensor));
            ASSERT_EQ(mine->boxes.at(static_cast<size_t>(matched.index)), owned.box);
          }
        }
      }
    }
  }
}

TEST(Match, ListsWhatDoesNotFit) {
  Members sources;
  sources[0].held = {held("w", {8, 4}, {{{0, 4}, {0, 4}}}), held("b", {8}, {{{0, 8}}})};
  sources[1].held = {held("w", {8, 4}, {{{4, 7}, {0, 4}}}), held("b", {9}, {{{0, 9}}}), held("out", {2}, {{{0, 3}}})};
  Members replicas;
  replicas[7].needed = {{"w", {{0, 8}, {0, 4}}, type("float32")}, {"v", {{0, 8}}, type("float32")}, {"b", {{4, 12}}, type("float32")}};
  const std::string error = errorOf(sources, replicas);
  for (const char* text : {"'b' is float32[8] on member 0, float32[9] on member 1", "'out' has the shape [2], member 1 holds [0:3]",
                           "member 7 needs [0:8] of 'v', which the source does not have", "member 7 needs [4:12] of 'b', whose shape is [8]",
                           "'w': nobody holds [7:8, 0:4] for rank 7"}) {
    EXPECT_NE(error.find(text), std::string::npos) << text << " is not in\n" << error;
  }
  replicas[7].needed.assign(25, {"none", {{0, 1}}, type("float32")});
  sources.erase(1);
  EXPECT_NE(errorOf(sources, replicas).find("... and 5 more"), std::string::npos);
}

TEST(Match, EqualBoxesComeOnceAndOverlappingOnesApart) {
  Members sources;
  sources[0].held = {held("w", {8}, {{{0, 8}}})};
  Members replicas;
  replicas[1].needed = {
      {"w", {{0, 8}}, type("float32")}, {"w", {{0, 8}}, type("float32")}, {"w", {{2, 4}}, type("float32")}, {"w", {{0, 8}}, type("bfloat16")}};
  const Match found = match(sources, replicas);
  EXPECT_EQ(found.names, (std::vector<std::string>{"w", "w", "w"}));
  EXPECT_EQ(found.copied.at(1), (std::vector<std::pair<int64_t, int64_t>>{{0, 1}}));
  EXPECT_EQ(found.received.at(1), (std::vector<MatchedBox>{{0, 3}, {1, 0}, {2, 2}}));
}

TEST(Manifest, ComesBack) {
  Manifest manifest;
  manifest.held = {held("a \"quoted\" name", {4, 2}, {{{0, 4}, {0, 1}}}), held("scalar", {}, {{}})};
  manifest.needed = {{"b", {{1, 2}}, type("bfloat16")}};
  EXPECT_EQ(manifestFromJson(manifestToJson(manifest)), manifest);
  EXPECT_EQ(manifestFromJson(manifestToJson({})), Manifest{});
  const auto complaint = [&](const std::string& from, const std::string& to) {
    std::string text = manifestToJson(manifest);
    text.replace(text.find(from), from.size(), to);
    try {
      manifestFromJson(text);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(complaint("[1,2]", "[2,2]").find("field needed[0].box[0]: expected begin and a greater end"), std::string::npos);
  EXPECT_NE(complaint("bfloat16", "float17").find("unknown dtype 'float17'"), std::string::npos);
  EXPECT_NE(complaint("[4,2]", "[4,-2]").find("negative extent -2"), std::string::npos);
  EXPECT_NE(complaint("\"version\":1", "\"version\":3").find("expected version 1, got 3"), std::string::npos);
}

}  // namespace
}  // namespace xmesh::core
