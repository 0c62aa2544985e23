#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/resharding/plan.h"
#include "core/tiling.h"
#include "runtime/program/program.h"

namespace xmesh::runtime {

/// Where the elements of a plan's tensors lie in the local tensors of one rank, at one end. A tensor on a mesh has one local tensor, which is nothing
/// outside the mesh; of a tensor in boxes each box of this rank is one. Threading: none.
class LocalPlaces {
 public:
  enum class End : uint8_t { kSource, kDestination };
  LocalPlaces(const core::ReshardingPlan& plan, End end, int64_t global_rank);

  /// By local tensor: its shape, and which tensor it is of.
  const std::vector<std::optional<std::vector<int64_t>>>& shapes() const { return shapes_; }
  const std::vector<int32_t>& tensors() const { return tensors_; }
  /// Where a box of a tensor lies; it is inside one piece or box of this rank's, else InvalidArgument.
  SliceBox place(int64_t tensor, const core::Box& box) const;

 private:
  struct OnMesh {
    core::Tiling tiling;
    std::vector<int64_t> coord;
  };
  struct Place {
    int32_t first = 0;              ///< of its local tensors
    std::optional<OnMesh> on_mesh;  ///< nothing outside the mesh
    std::vector<core::Box> boxes;   ///< this rank's, by local tensor
    int64_t item_bytes = 0;
  };

  const bool is_src_;
  std::vector<Place> places_;  ///< by tensor
  std::vector<std::optional<std::vector<int64_t>>> shapes_;
  std::vector<int32_t> tensors_;
};

}  // namespace xmesh::runtime
