#pragma once

#include "core/resharding/plan.h"

namespace xmesh::core {

/// Replays a plan's messages in order over element ranges. Throws InvalidArgument with a grid of the task's messages, the bad one marked, when an
/// index is out of range, a sender does not have what it sends at that point or has given it away, a receiver does not need it or has it already, a
/// contribution is doubled, missing or left where nobody needs it, or a needer ends without all elements.
void validatePlan(const ReshardingPlan& plan);

}  // namespace xmesh::core
