#include "core/tiling.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace xmesh::core {
namespace {

using Intervals = std::vector<Interval>;

/// torch.chunk's rule on a sequence of intervals seen as one run of elements: chunk `index` of `count`, each ceil(n / count) long.
Intervals chunkOf(const Intervals& whole, int64_t count, int64_t index) {
  int64_t total = 0;
  for (const Interval& piece : whole) {
    total += piece.size();
  }
  const int64_t chunk = (total + count - 1) / count;
  const int64_t begin = std::min(total, chunk * index);
  const int64_t end = std::min(total, begin + chunk);
  Intervals out;
  int64_t seen = 0;
  for (const Interval& piece : whole) {
    const int64_t from = std::max(begin, seen);
    const int64_t to = std::min(end, seen + piece.size());
    if (from < to) {
      out.push_back({piece.begin + from - seen, piece.begin + to - seen});
    }
    seen += piece.size();
  }
  return out;
}

void appendMerged(Intervals& out, const Intervals& more) {
  for (const Interval& piece : more) {
    if (!out.empty() && out.back().end == piece.begin) {
      out.back().end = piece.end;
    } else {
      out.push_back(piece);
    }
  }
}

Intervals shardOf(const Intervals& whole, const Placement& placement, int64_t count, int64_t index) {
  if (placement.kind == PlacementKind::kShard) {
    return chunkOf(whole, count, index);
  }
  Intervals out;  // a strided shard: the index-th chunk of each of split_factor chunks
  for (int64_t outer = 0; outer < placement.split_factor; ++outer) {
    appendMerged(out, chunkOf(chunkOf(whole, placement.split_factor, outer), count, index));
  }
  return out;
}

}  // namespace

Tiling::Tiling(const TensorSpec& spec)
    : mesh_shape_(spec.mesh.shape()),
      axes_of_dim_(spec.shape.size()),
      num_parts_(spec.shape.size(), 1),
      pieces_(spec.shape.size()),
      part_sizes_(spec.shape.size()) {
  for (size_t dim = 0; dim < spec.shape.size(); ++dim) {
    std::vector<Intervals> parts = {Intervals{}};
    if (spec.shape[dim] > 0) {
      parts[0].push_back({0, spec.shape[dim]});
    }
    for (size_t axis = 0; axis < spec.placements.size(); ++axis) {
      const Placement& placement = spec.placements[axis];
      if (!placement.isShard() || std::cmp_not_equal(placement.dim, dim)) {
        continue;
      }
      axes_of_dim_[dim].push_back(static_cast<int64_t>(axis));
      num_parts_[dim] *= mesh_shape_[axis];
      std::vector<Intervals> finer;
      for (const Intervals& part : parts) {
        for (int64_t index = 0; index < mesh_shape_[axis]; ++index) {
          finer.push_back(shardOf(part, placement, mesh_shape_[axis], index));
        }
      }
      parts = std::move(finer);
    }
    for (size_t part = 0; part < parts.size(); ++part) {
      int64_t local = 0;
      for (const Interval& interval : parts[part]) {
        pieces_[dim].push_back({interval, static_cast<int64_t>(part), local});
        local += interval.size();
      }
      part_sizes_[dim].push_back(local);
    }
    std::sort(pieces_[dim].begin(), pieces_[dim].end(), [](const DimPiece& a, const DimPiece& b) { return a.interval.begin < b.interval.begin; });
  }
}

int64_t Tiling::partOf(int64_t dim, const std::vector<int64_t>& mesh_coord) const {
  int64_t part = 0;
  for (int64_t axis : axes_of_dim_.at(static_cast<size_t>(dim))) {
    part = part * mesh_shape_[static_cast<size_t>(axis)] + mesh_coord.at(static_cast<size_t>(axis));
  }
  return part;
}

std::vector<int64_t> Tiling::localShape(const std::vector<int64_t>& mesh_coord) const {
  std::vector<int64_t> shape;
  for (size_t dim = 0; dim < pieces_.size(); ++dim) {
    shape.push_back(part_sizes_[dim][static_cast<size_t>(partOf(static_cast<int64_t>(dim), mesh_coord))]);
  }
  return shape;
}

std::vector<int64_t> localOffset(const Tiling& tiling, const std::vector<int64_t>& mesh_coord, const Box& box) {
  std::vector<int64_t> offset;
  for (size_t dim = 0; dim < box.size(); ++dim) {
    const std::vector<DimPiece>& pieces = tiling.pieces(static_cast<int64_t>(dim));
    auto piece =
        std::upper_bound(pieces.begin(), pieces.end(), box[dim].begin, [](int64_t begin, const DimPiece& p) { return begin < p.interval.begin; });
    require(piece != pieces.begin(), "box " + boxStr(box) + " lies outside the tensor");
    --piece;
    require(piece->part == tiling.partOf(static_cast<int64_t>(dim), mesh_coord) && box[dim].end <= piece->interval.end,
            "box " + boxStr(box) + " is not inside the rank's tile");
    offset.push_back(piece->local_begin + box[dim].begin - piece->interval.begin);
  }
  return offset;
}

}  // namespace xmesh::core
