#include "core/resharding/decompose.h"

#include <algorithm>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/error.h"
#include "core/resharding/box_refinement.h"
#include "core/tiling.h"

namespace xmesh::core {
namespace {

/// A stretch of one dim that lies in one source part and one destination part.
struct DimSlice {
  Interval interval;
  int64_t src_part = 0;
  int64_t dst_part = 0;
};

std::vector<DimSlice> intersect(const std::vector<DimPiece>& src, const std::vector<DimPiece>& dst) {
  std::vector<DimSlice> out;
  for (size_t i = 0, j = 0; i < src.size() && j < dst.size();) {
    const int64_t begin = std::max(src[i].interval.begin, dst[j].interval.begin);
    const int64_t end = std::min(src[i].interval.end, dst[j].interval.end);
    out.push_back({{begin, end}, src[i].part, dst[j].part});
    const bool src_ends = src[i].interval.end == end;
    const bool dst_ends = dst[j].interval.end == end;
    i += src_ends ? 1 : 0;
    j += dst_ends ? 1 : 0;
  }
  return out;
}

int64_t tileIndex(const Tiling& tiling, const std::vector<int64_t>& parts) {
  int64_t index = 0;
  for (size_t dim = 0; dim < parts.size(); ++dim) {
    index = index * tiling.numParts(static_cast<int64_t>(dim)) + parts[dim];
  }
  return index;
}

int64_t tileOfRank(const TensorSpec& spec, const Tiling& tiling, const std::vector<int64_t>& coord) {
  std::vector<int64_t> parts(spec.shape.size());
  for (size_t dim = 0; dim < parts.size(); ++dim) {
    parts[dim] = tiling.partOf(static_cast<int64_t>(dim), coord);
  }
  return tileIndex(tiling, parts);
}

int64_t contributionOf(const TensorSpec& spec, const std::vector<int64_t>& coord) {
  int64_t index = 0;
  for (size_t axis = 0; axis < coord.size(); ++axis) {
    if (spec.placements[axis].kind == PlacementKind::kPartial) {
      index = index * spec.mesh.shape()[axis] + coord[axis];
    }
  }
  return index;
}

/// Gives equal values one index in a table.
template <typename Value, typename Key>
class Interner {
 public:
  explicit Interner(std::vector<Value>& table) : table_(table) {}
  int64_t indexOf(const Key& key, const Value& value) {
    const auto [entry, is_new] = index_.try_emplace(key, static_cast<int64_t>(table_.size()));
    if (is_new) {
      table_.push_back(value);
    }
    return entry->second;
  }

 private:
  std::vector<Value>& table_;
  std::map<Key, int64_t> index_;
};

using HoldersInterner = Interner<Holders, std::vector<std::vector<int64_t>>>;
using NeedersInterner = Interner<std::vector<int64_t>, std::vector<int64_t>>;

/// Rows of a table by tile.
class TableIndexOfTile {
 public:
  explicit TableIndexOfTile(const Tiling& tiling, size_t num_dims) {
    int64_t num_tiles = 1;
    for (size_t dim = 0; dim < num_dims && num_tiles <= kLargestTable; ++dim) {
      num_tiles *= tiling.numParts(static_cast<int64_t>(dim));
    }
    dense_.resize(num_tiles <= kLargestTable ? static_cast<size_t>(num_tiles) : 0, -1);
  }
  int64_t& operator[](int64_t tile) { return dense_.empty() ? sparse_[tile] : dense_[static_cast<size_t>(tile)]; }

 private:
  static constexpr int64_t kLargestTable = int64_t{1} << 17;
  std::vector<int64_t> dense_;
  std::unordered_map<int64_t, int64_t> sparse_;
};

TableIndexOfTile holdersOfTiles(const TensorSpec& spec, const Tiling& tiling, HoldersInterner& interner) {
  int64_t num_contributions = 1;
  for (size_t axis = 0; axis < spec.placements.size(); ++axis) {
    num_contributions *= spec.placements[axis].kind == PlacementKind::kPartial ? spec.mesh.shape()[axis] : 1;
  }
  std::map<int64_t, Holders> of_tile;
  for (int64_t i = 0; i < spec.mesh.numRanks(); ++i) {
    const std::vector<int64_t> coord = spec.mesh.coordOfIndex(i);
    Holders& holders = of_tile[tileOfRank(spec, tiling, coord)];
    holders.contributions.resize(static_cast<size_t>(num_contributions));
    holders.contributions[static_cast<size_t>(contributionOf(spec, coord))].push_back(spec.mesh.ranks()[static_cast<size_t>(i)]);
  }
  TableIndexOfTile out(tiling, spec.shape.size());
  for (auto& [tile, holders] : of_tile) {
    for (std::vector<int64_t>& ranks : holders.contributions) {
      std::sort(ranks.begin(), ranks.end());
    }
    out[tile] = interner.indexOf(holders.contributions, holders);
  }
  return out;
}

TableIndexOfTile needersOfTiles(const TensorSpec& spec, const Tiling& tiling, NeedersInterner& interner) {
  std::map<int64_t, std::vector<int64_t>> of_tile;
  for (int64_t i = 0; i < spec.mesh.numRanks(); ++i) {
    of_tile[tileOfRank(spec, tiling, spec.mesh.coordOfIndex(i))].push_back(spec.mesh.ranks()[static_cast<size_t>(i)]);
  }
  TableIndexOfTile out(tiling, spec.shape.size());
  for (auto& [tile, ranks] : of_tile) {
    std::sort(ranks.begin(), ranks.end());
    out[tile] = interner.indexOf(ranks, ranks);
  }
  return out;
}

/// Steps `index` through the product of `extents`, last fastest. False after the last one.
bool advance(std::vector<size_t>& index, const std::vector<size_t>& extents) {
  for (size_t dim = extents.size(); dim-- > 0;) {
    if (++index[dim] < extents[dim]) {
      return true;
    }
    index[dim] = 0;
  }
  return false;
}

/// Meshes at both ends: dim by dim.
void decomposeTiles(ReshardingPlan& plan, size_t tensor, HoldersInterner& holders, NeedersInterner& needers) {
  const auto& [src, dst] = plan.tensors[tensor];
  const Tiling src_tiling(src);
  const Tiling dst_tiling(dst);
  TableIndexOfTile holders_of = holdersOfTiles(src, src_tiling, holders);
  TableIndexOfTile needers_of = needersOfTiles(dst, dst_tiling, needers);
  const size_t num_dims = src.shape.size();
  std::vector<std::vector<DimSlice>> slices(num_dims);
  std::vector<size_t> extents(num_dims);
  for (size_t dim = 0; dim < num_dims; ++dim) {
    slices[dim] = intersect(src_tiling.pieces(static_cast<int64_t>(dim)), dst_tiling.pieces(static_cast<int64_t>(dim)));
    extents[dim] = slices[dim].size();
  }
  std::vector<size_t> index(num_dims, 0);
  std::vector<int64_t> src_parts(num_dims);
  std::vector<int64_t> dst_parts(num_dims);
  do {
    UnitTask task;
    task.tensor = static_cast<int64_t>(tensor);
    task.box.resize(num_dims);
    for (size_t dim = 0; dim < num_dims; ++dim) {
      const DimSlice& slice = slices[dim][index[dim]];
      task.box[dim] = slice.interval;
      src_parts[dim] = slice.src_part;
      dst_parts[dim] = slice.dst_part;
    }
    task.holders = holders_of[tileIndex(src_tiling, src_parts)];
    task.needers = needers_of[tileIndex(dst_tiling, dst_parts)];
    plan.tasks.push_back(std::move(task));
  } while (advance(index, extents));
}

/// Boxes at an end or both.
void decomposeBoxes(ReshardingPlan& plan, size_t tensor, HoldersInterner& holders, NeedersInterner& needers) {
  const auto& [src, dst] = plan.tensors[tensor];
  try {
    for (SharedBox& shared : refineBoxes(src.shape, ownedBoxes(src), ownedBoxes(dst))) {
      UnitTask task;
      task.tensor = static_cast<int64_t>(tensor);
      task.box = std::move(shared.box);
      const Holders held{{std::move(shared.holders)}};
      task.holders = holders.indexOf(held.contributions, held);
      task.needers = needers.indexOf(shared.needers, shared.needers);
      plan.tasks.push_back(std::move(task));
    }
  } catch (const InvalidArgument& error) {
    throw InvalidArgument("tensor " + std::to_string(tensor) + ": " + error.what());
  }
}

}  // namespace

void decompose(ReshardingPlan& plan) {
  plan.tasks.clear();
  plan.holders.clear();
  plan.needers.clear();
  HoldersInterner holders(plan.holders);
  NeedersInterner needers(plan.needers);
  for (size_t tensor = 0; tensor < plan.tensors.size(); ++tensor) {
    const auto& [src, dst] = plan.tensors[tensor];
    if (src.numElements() == 0) {
      continue;
    }
    if (src.isBoxed() || dst.isBoxed()) {
      decomposeBoxes(plan, tensor, holders, needers);
    } else {
      decomposeTiles(plan, tensor, holders, needers);
    }
  }
}

}  // namespace xmesh::core
