#pragma once

#include <cstdint>
#include <vector>

#include "core/resharding/plan.h"

namespace xmesh::core {

/// Tensors, or boxes of them, that move together.
struct Wave {
  std::vector<TensorPair> tensors;  ///< a part of a tensor is in boxes at both ends
  std::vector<int64_t> indices;     ///< by tensor of the wave: which of all tensors it is a part of; ascending
  bool operator==(const Wave&) const = default;
};

/// Divides tensors into waves, in which no rank sends or receives more than `max_bytes` of its own: what a rank passes on, or sends to several,
/// counts once. So a rank needs no more memory than that for a wave's tensors at either end, where it cannot send from their memory or receive into
/// it. Tensors keep their order; one that is too large is cut, the slowest dim first. Objective: few waves, each filled as the next tensor fits. An
/// element that is larger than the bound goes alone. Throws InvalidArgument for a bound below one byte, and for a Partial source that must be cut.
std::vector<Wave> cutIntoWaves(const std::vector<TensorPair>& tensors, int64_t max_bytes);

}  // namespace xmesh::core
