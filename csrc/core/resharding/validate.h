#pragma once

#include "core/resharding/plan.h"

namespace xmesh::core {

/// Replays a plan's messages in order over element ranges. Throws InvalidArgument with a grid of the task's messages, the bad one marked, when an
/// index is out of range, a sender does not have what it sends at that point, a receiver does not need it or has it already, a
/// contribution is doubled or missing, or a needer ends without all elements.
void validatePlan(const ReshardingPlan& plan);

}  // namespace xmesh::core
