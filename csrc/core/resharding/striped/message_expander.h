#pragma once

#include <vector>

#include "core/resharding/network.h"
#include "core/resharding/striped/chunk_schedule.h"
#include "core/resharding/striped/cut.h"

namespace xmesh::core {

/// Turns hops of chunks between hosts into messages between ranks: one needer per host takes a slice from outside (or reduces it) and a chain
/// passes it on to the others there.
/// Appends the messages to the plan, and what moves only inside hosts.
void expandHops(ReshardingPlan& plan, const Network& network, const Cut& cut, const std::vector<ChunkHop>& hops);

}  // namespace xmesh::core
