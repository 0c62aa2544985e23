#pragma once

#include <cstdint>
#include <vector>

#include "core/slice.h"
#include "core/spec.h"

namespace xmesh::core {

/// One piece of a dim as a spec cuts it: the global interval, which part of the dim it belongs to (a flat index over the coordinates of the
/// mesh axes that shard the dim), and where it begins inside that part's local extent.
struct DimPiece {
  Interval interval;
  int64_t part = 0;
  int64_t local_begin = 0;
};

/// How a spec cuts a tensor: every dim by itself into parts; a rank's tile is the product of one part per dim. A part is one interval,
/// or several with a strided shard; inside a local tensor the intervals of a part follow one another.
/// DTensor's rule: an axis cuts into ceil chunks, mesh axes left to right, the last chunks may be short or empty.
class Tiling {
 public:
  explicit Tiling(const TensorSpec& spec);

  /// All non-empty pieces of a dim, ascending; together they cover it exactly.
  const std::vector<DimPiece>& pieces(int64_t dim) const { return pieces_.at(static_cast<size_t>(dim)); }
  /// Number of parts of a dim (the product of the extents of the axes that shard it).
  int64_t numParts(int64_t dim) const { return num_parts_.at(static_cast<size_t>(dim)); }
  /// The part of `dim` that the rank at `mesh_coord` holds.
  int64_t partOf(int64_t dim, const std::vector<int64_t>& mesh_coord) const;
  /// Shape of the local tensor at `mesh_coord`.
  std::vector<int64_t> localShape(const std::vector<int64_t>& mesh_coord) const;

 private:
  std::vector<int64_t> mesh_shape_;
  std::vector<std::vector<int64_t>> axes_of_dim_;  ///< mesh axes that shard a dim, left to right
  std::vector<int64_t> num_parts_;
  std::vector<std::vector<DimPiece>> pieces_;
  std::vector<std::vector<int64_t>> part_sizes_;  ///< [dim][part]
};

/// Where the box lies in the local tensor of the rank at `mesh_coord`: local begin per dim. The box must lie inside one piece per dim of that rank's
/// tile.
std::vector<int64_t> localOffset(const Tiling& tiling, const std::vector<int64_t>& mesh_coord, const Box& box);

}  // namespace xmesh::core
