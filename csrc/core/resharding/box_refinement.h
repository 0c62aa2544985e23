#pragma once

#include <cstdint>
#include <vector>

#include "core/slice.h"
#include "core/spec.h"

namespace xmesh::core {

/// A box of a tensor all of whose elements have the same holders and the same needers (ascending global ranks).
struct SharedBox {
  Box box;
  std::vector<int64_t> holders;
  std::vector<int64_t> needers;
};

/// Cuts what some rank needs of a tensor into boxes of common holders and needers, as few as cuts along whole dims and joining neighbors again give;
/// in row-major order of their first elements. Objective: few messages, and every element with one set of needers sent once.
/// Throws InvalidArgument for boxes of one rank that overlap on one side, and naming what nobody holds.
std::vector<SharedBox> refineBoxes(const std::vector<int64_t>& shape, const std::vector<OwnedBox>& held, const std::vector<OwnedBox>& needed);

/// A spec's tiles as boxes with owners; those of a spec that has boxes as they are. Empty tiles are left out. The spec has no Partial placement.
std::vector<OwnedBox> ownedBoxes(const TensorSpec& spec);

/// The same in boxes, without ranks that are gone; a box may be left without an owner.
TensorSpec withoutRanks(const TensorSpec& spec, const std::vector<int64_t>& gone);

}  // namespace xmesh::core
