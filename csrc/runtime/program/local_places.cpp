#include "runtime/program/local_places.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace xmesh::runtime {
namespace {

bool isInside(const core::Box& inner, const core::Box& outer) {
  for (size_t dim = 0; dim < inner.size(); ++dim) {
    if (inner[dim].begin < outer[dim].begin || inner[dim].end > outer[dim].end) {
      return false;
    }
  }
  return true;
}

std::vector<int64_t> shapeOf(const core::Box& box) {
  std::vector<int64_t> out;
  for (const core::Interval& interval : box) {
    out.push_back(interval.size());
  }
  return out;
}

}  // namespace

LocalPlaces::LocalPlaces(const core::ReshardingPlan& plan, End end, int64_t global_rank) : is_src_(end == End::kSource) {
  for (const core::TensorPair& pair : plan.tensors) {
    const core::TensorSpec& spec = is_src_ ? pair.src : pair.dst;
    Place place;
    place.first = static_cast<int32_t>(shapes_.size());
    place.item_bytes = spec.dtype.item_bytes;
    if (spec.isBoxed()) {
      for (const core::OwnedBox& owned : spec.boxes) {
        if (std::binary_search(owned.ranks.begin(), owned.ranks.end(), global_rank)) {
          shapes_.emplace_back(shapeOf(owned.box));
          place.boxes.push_back(owned.box);
        }
      }
    } else if (const int64_t index = spec.mesh.indexOfRank(global_rank); index >= 0) {
      place.on_mesh = OnMesh{core::Tiling(spec), spec.mesh.coordOfIndex(index)};
      shapes_.emplace_back(place.on_mesh->tiling.localShape(place.on_mesh->coord));
    } else {
      shapes_.emplace_back(std::nullopt);
    }
    tensors_.resize(shapes_.size(), static_cast<int32_t>(places_.size()));
    places_.push_back(std::move(place));
  }
}

SliceBox LocalPlaces::place(int64_t tensor, const core::Box& box) const {
  const Place& place = places_.at(static_cast<size_t>(tensor));
  SliceBox out;
  out.tensor = place.first;
  out.is_src = is_src_;
  out.item_bytes = place.item_bytes;
  if (place.on_mesh.has_value()) {
    const std::vector<int64_t> offset = core::localOffset(place.on_mesh->tiling, place.on_mesh->coord, box);
    std::copy(offset.begin(), offset.end(), out.offsets.begin());
  } else {
    const auto owned = std::find_if(place.boxes.begin(), place.boxes.end(), [&](const core::Box& candidate) { return isInside(box, candidate); });
    core::require(owned != place.boxes.end(), "box " + core::boxStr(box) + " is in no box of the rank");
    out.tensor += static_cast<int32_t>(owned - place.boxes.begin());
    for (size_t dim = 0; dim < box.size(); ++dim) {
      out.offsets[dim] = box[dim].begin - (*owned)[dim].begin;
    }
  }
  for (size_t dim = 0; dim < box.size(); ++dim) {
    out.extents[dim] = box[dim].size();
  }
  return out;
}

}  // namespace xmesh::runtime
