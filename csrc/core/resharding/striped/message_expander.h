#pragma once

#include <vector>

#include "core/resharding/network.h"
#include "core/resharding/striped/chunk_schedule.h"
#include "core/resharding/striped/shipments.h"

namespace xmesh::core {

/// Turns transfers of atoms between hosts into messages between ranks: one needer per host takes a slice from outside (or reduces it) and a chain
/// passes it on to the others there.
/// Appends the messages to the plan, and what moves only inside hosts.
void expandTransfers(ReshardingPlan& plan, const Network& network, const Shipments& shipments, const std::vector<AtomTransfer>& transfers);

}  // namespace xmesh::core
