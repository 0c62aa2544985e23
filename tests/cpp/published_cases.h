#pragma once

#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "core/resharding/plan.h"

namespace xmesh::layouts {

/// A published resharding case (AlpaComm, MLSys'23, Table 2) and its makespans in units of the smallest slice.
struct PublishedCase {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<int64_t> src_mesh;
  std::vector<core::Placement> src;
  std::vector<int64_t> dst_mesh;
  std::vector<core::Placement> dst;
  int64_t num_tasks = 0;
  int64_t naive = 0;
  int64_t size = 0;
  int64_t greedy = 0;
  int64_t dfs = 0;
};

inline std::vector<PublishedCase> publishedCases() {
  const core::Placement r = core::Placement::replicate();
  const core::Placement s0 = core::Placement::shard(0);
  const core::Placement s1 = core::Placement::shard(1);
  const core::Placement s2 = core::Placement::shard(2);
  const std::vector<int64_t> shape = {1024, 1024, 512};
  return {
      {"c1", shape, {2, 4}, {s0, r}, {2, 4}, {s0, r}, 2, 1, 1, 1, 1}, {"c2", shape, {2, 4}, {r, r}, {2, 4}, {s0, r}, 2, 2, 1, 1, 1},
      {"c3", shape, {2, 4}, {s1, r}, {2, 4}, {s0, r}, 4, 3, 3, 2, 2}, {"c4", shape, {2, 4}, {s1, s1}, {2, 4}, {s0, s0}, 64, 60, 60, 32, 60},
      {"c5", shape, {2, 4}, {r, s0}, {2, 4}, {s0, r}, 4, 4, 3, 2, 2}, {"c6", {3072, 1024, 170}, {2, 4}, {s0, r}, {3, 4}, {s0, r}, 4, 6, 6, 3, 3},
      {"c7", shape, {1, 4}, {r, s0}, {2, 4}, {r, r}, 4, 4, 4, 4, 4},  {"c8", shape, {1, 4}, {r, s0}, {2, 4}, {r, r}, 4, 4, 4, 4, 4},
      {"c9", shape, {2, 4}, {s1, r}, {2, 4}, {s2, r}, 4, 3, 3, 2, 2},
  };
}

/// The case on consecutive ranks, source first, float32.
inline core::TensorPair pairOf(const PublishedCase& published) {
  const auto count = [](const std::vector<int64_t>& extents) {
    return std::accumulate(extents.begin(), extents.end(), int64_t{1}, std::multiplies<>());
  };
  std::vector<int64_t> src_ranks(static_cast<size_t>(count(published.src_mesh)));
  std::vector<int64_t> dst_ranks(static_cast<size_t>(count(published.dst_mesh)));
  std::iota(src_ranks.begin(), src_ranks.end(), int64_t{0});
  std::iota(dst_ranks.begin(), dst_ranks.end(), static_cast<int64_t>(src_ranks.size()));
  const core::DType dtype = core::DType::parse("float32");
  return {{published.shape, dtype, core::Mesh(published.src_mesh, src_ranks), published.src},
          {published.shape, dtype, core::Mesh(published.dst_mesh, dst_ranks), published.dst}};
}

/// Four devices a host, source and destination on hosts of their own.
inline core::Topology topologyOf(const PublishedCase& published) {
  const core::TensorPair pair = pairOf(published);
  return core::Topology::uniform(pair.src.mesh.numRanks() + pair.dst.mesh.numRanks(), 4);
}

}  // namespace xmesh::layouts
