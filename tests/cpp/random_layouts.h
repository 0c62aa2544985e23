#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "core/resharding/plan.h"

namespace xmesh::layouts {

/// What randomPair may draw. The ranks of both meshes come from 0..num_ranks-1.
struct LayoutOptions {
  int64_t num_ranks = 12;
  int64_t max_dims = 4;
  int64_t max_axes = 3;
  int64_t max_extent = 9;       ///< per dim
  int64_t max_elements = 1024;  ///< of the whole tensor
  bool allow_partial = true;
  bool allow_strided = true;
  bool allow_zero_size = true;
};

/// Uniform in [low, high], the same on every standard library.
inline int64_t randomInt(std::mt19937_64& rng, int64_t low, int64_t high) {
  return low + static_cast<int64_t>(rng() % static_cast<uint64_t>(high - low + 1));
}

inline void shuffleRanks(std::mt19937_64& rng, std::vector<int64_t>& ranks) {
  for (size_t i = ranks.size(); i > 1; --i) {
    std::swap(ranks[i - 1], ranks[static_cast<size_t>(randomInt(rng, 0, static_cast<int64_t>(i) - 1))]);
  }
}

/// Mesh extents with 1..max_axes axes and a product of at most max_ranks.
inline std::vector<int64_t> randomMeshShape(std::mt19937_64& rng, int64_t max_axes, int64_t max_ranks) {
  std::vector<int64_t> shape(static_cast<size_t>(randomInt(rng, 1, max_axes)));
  int64_t left = max_ranks;
  for (int64_t& extent : shape) {
    extent = randomInt(rng, 1, std::min<int64_t>(left, 5));
    left /= extent;
  }
  shuffleRanks(rng, shape);
  return shape;
}

inline int64_t product(const std::vector<int64_t>& extents) {
  return std::accumulate(extents.begin(), extents.end(), int64_t{1}, std::multiplies<>());
}

inline core::Mesh randomMesh(std::mt19937_64& rng, const LayoutOptions& options, std::vector<int64_t> pool) {
  const std::vector<int64_t> shape = randomMeshShape(rng, options.max_axes, static_cast<int64_t>(pool.size()));
  if (randomInt(rng, 0, 1) == 0) {
    shuffleRanks(rng, pool);
  }
  pool.resize(static_cast<size_t>(product(shape)));
  return core::Mesh(shape, pool);
}

/// Two meshes that are disjoint, overlapping, nested or identical (possibly with their ranks in another order), each about as often.
inline std::pair<core::Mesh, core::Mesh> randomMeshes(std::mt19937_64& rng, const LayoutOptions& options) {
  std::vector<int64_t> all(static_cast<size_t>(options.num_ranks));
  std::iota(all.begin(), all.end(), int64_t{0});
  const int64_t relation = options.num_ranks < 2 ? 1 : randomInt(rng, 0, 3);
  if (relation == 0) {
    const auto cut = all.begin() + static_cast<std::ptrdiff_t>(randomInt(rng, 1, options.num_ranks - 1));
    core::Mesh src = randomMesh(rng, options, {all.begin(), cut});
    core::Mesh dst = randomMesh(rng, options, {cut, all.end()});
    return randomInt(rng, 0, 1) == 0 ? std::pair(src, dst) : std::pair(dst, src);
  }
  core::Mesh first = randomMesh(rng, options, all);
  std::vector<int64_t> ranks = first.ranks();
  if (relation == 1) {
    if (randomInt(rng, 0, 1) == 0) {
      shuffleRanks(rng, ranks);
    }
    return {first, core::Mesh(randomInt(rng, 0, 1) == 0 ? first.shape() : std::vector<int64_t>{first.numRanks()}, ranks)};
  }
  core::Mesh second = randomMesh(rng, options, relation == 2 ? all : ranks);
  return randomInt(rng, 0, 1) == 0 ? std::pair(first, second) : std::pair(second, first);
}

inline std::vector<core::Placement> randomPlacements(std::mt19937_64& rng, const LayoutOptions& options, int64_t num_axes, int64_t num_dims,
                                                     bool may_be_partial) {
  constexpr core::ReduceOp kOps[] = {core::ReduceOp::kSum, core::ReduceOp::kAvg, core::ReduceOp::kMin, core::ReduceOp::kMax,
                                     core::ReduceOp::kProduct};
  const core::ReduceOp op = kOps[randomInt(rng, 0, 4)];
  const bool is_partial = may_be_partial && options.allow_partial && randomInt(rng, 0, 3) == 0;
  std::vector<core::Placement> out;
  for (int64_t axis = 0; axis < num_axes; ++axis) {
    const int64_t kind = randomInt(rng, 0, 9);
    if (is_partial && kind < 5) {
      out.push_back(core::Placement::partial(op));
    } else if (num_dims == 0 || kind < 3) {
      out.push_back(core::Placement::replicate());
    } else if (options.allow_strided && kind == 3) {
      out.push_back(core::Placement::stridedShard(randomInt(rng, 0, num_dims - 1), randomInt(rng, 1, 4)));
    } else {
      out.push_back(core::Placement::shard(randomInt(rng, 0, num_dims - 1)));
    }
  }
  return out;
}

/// A random reshard: uneven, strided, Partial (float32 only), overlapping, nested, disjoint or identical meshes, zero-size dims, scalars.
/// The same generator state gives the same pair on every machine.
inline core::TensorPair randomPair(std::mt19937_64& rng, const LayoutOptions& options = {}) {
  core::TensorPair pair;
  auto [src_mesh, dst_mesh] = randomMeshes(rng, options);
  pair.src.mesh = std::move(src_mesh);
  pair.dst.mesh = std::move(dst_mesh);
  const int64_t num_dims = randomInt(rng, 0, options.max_dims);
  int64_t left = options.max_elements;
  for (int64_t dim = 0; dim < num_dims; ++dim) {
    const bool is_empty = options.allow_zero_size && randomInt(rng, 0, 39) == 0;
    const int64_t extent = is_empty ? 0 : randomInt(rng, 1, std::min(options.max_extent, std::max<int64_t>(left, 1)));
    left /= std::max<int64_t>(extent, 1);
    pair.src.shape.push_back(extent);
  }
  pair.src.placements = randomPlacements(rng, options, pair.src.mesh.numAxes(), num_dims, true);
  pair.dst.placements = randomPlacements(rng, options, pair.dst.mesh.numAxes(), num_dims, false);
  constexpr const char* kDtypes[] = {"float32", "bfloat16", "bool", "float64", "complex128", "uint8"};
  pair.src.dtype = core::DType::parse(pair.src.hasPartial() ? "float32" : kDtypes[randomInt(rng, 0, 5)]);
  pair.dst.shape = pair.src.shape;
  pair.dst.dtype = pair.src.dtype;
  return pair;
}

/// Cuts a box in two at random, again and again.
inline std::vector<core::Box> randomPartition(std::mt19937_64& rng, const core::Box& whole) {
  std::vector<core::Box> out = {whole};
  for (int64_t cuts = randomInt(rng, 0, 5); cuts > 0 && !whole.empty(); --cuts) {
    const auto which = static_cast<size_t>(randomInt(rng, 0, static_cast<int64_t>(out.size()) - 1));
    const auto dim = static_cast<size_t>(randomInt(rng, 0, static_cast<int64_t>(whole.size()) - 1));
    const core::Interval interval = out[which][dim];
    if (interval.size() > 1) {
      const int64_t at = randomInt(rng, interval.begin + 1, interval.end - 1);
      out.push_back(out[which]);
      out.back()[dim].begin = at;
      out[which][dim].end = at;
    }
  }
  return out;
}

/// Boxes with owners: groups of ranks cut the tensor each in its own way; within a group some boxes have one owner, some several, some none but in
/// the first group, which covers the tensor where it must.
inline std::vector<core::OwnedBox> randomBoxes(std::mt19937_64& rng, const std::vector<int64_t>& shape, std::vector<int64_t> ranks, bool covers) {
  core::Box whole;
  for (const int64_t extent : shape) {
    whole.push_back({0, extent});
  }
  shuffleRanks(rng, ranks);
  std::vector<core::OwnedBox> out;
  for (size_t begin = 0; begin < ranks.size();) {
    const auto end = static_cast<size_t>(randomInt(rng, static_cast<int64_t>(begin) + 1, static_cast<int64_t>(ranks.size())));
    for (core::Box& box : randomPartition(rng, whole)) {
      std::vector<int64_t> owners;
      for (size_t i = begin; i < end; ++i) {
        if (randomInt(rng, 0, 2) == 0) {
          owners.push_back(ranks[i]);
        }
      }
      if (owners.empty() && covers && begin == 0) {
        owners.push_back(ranks[static_cast<size_t>(randomInt(rng, 0, static_cast<int64_t>(end) - 1))]);
      }
      std::sort(owners.begin(), owners.end());
      out.push_back({std::move(box), std::move(owners)});
    }
    begin = end;
  }
  return out;
}

/// Turns one end of a pair or both into random boxes on the same ranks, where that is possible: not of what has no elements or is Partial.
inline void drawBoxes(std::mt19937_64& rng, core::TensorPair& pair) {
  if (product(pair.src.shape) == 0 || pair.src.hasPartial()) {
    return;
  }
  const int64_t which = randomInt(rng, 0, 2);
  for (core::TensorSpec* spec : {&pair.src, &pair.dst}) {
    if (which != (spec == &pair.src ? 1 : 0)) {
      *spec = {spec->shape, spec->dtype, {}, {}, randomBoxes(rng, spec->shape, spec->mesh.ranks(), spec == &pair.src)};
    }
  }
}

/// Ranks 0..num_ranks-1 on random hosts: consecutive blocks or scattered; NIC rates sometimes differ between hosts.
inline core::Topology randomTopology(std::mt19937_64& rng, int64_t num_ranks) {
  std::map<int64_t, int64_t> host_of;
  const int64_t devices_per_host = randomInt(rng, 1, 4);
  const bool is_scattered = randomInt(rng, 0, 3) == 0;
  const int64_t num_hosts = (num_ranks + devices_per_host - 1) / devices_per_host;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    host_of[rank] = is_scattered ? randomInt(rng, 0, num_hosts - 1) : rank / devices_per_host;
  }
  std::map<int64_t, int64_t> nic_of_host;
  if (randomInt(rng, 0, 3) == 0) {
    for (int64_t host = 0; host < num_hosts; ++host) {
      nic_of_host[host] = 1'000'000'000 * randomInt(rng, 1, 4);
    }
  }
  return core::Topology(std::move(host_of), core::LinkModel{}, std::move(nic_of_host));
}

}  // namespace xmesh::layouts
