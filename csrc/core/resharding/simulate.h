#pragma once

#include <cstdint>
#include <vector>

#include "core/resharding/network.h"
#include "core/resharding/plan.h"

namespace xmesh::core {

/// When each message of a plan is on its way, in seconds from the start.
struct SimulatedPlan {
  double seconds = 0;           ///< until the last byte is there
  std::vector<double> start_s;  ///< by message
  std::vector<double> end_s;    ///< by message: when its last byte is at the receiver
};

/// Plays a plan's messages on its topology as the executor does: a rank offers its messages to each peer in plan order, each as soon as its
/// data is there; a port that falls free takes the offered message that comes first in the plan among those (kLookAhead per port) whose
/// other port is free. NICs are full duplex; a message holds each of its two ports for message_us + bytes / that port's rate and
/// arrives latency_us later. Inside a host ranks have ports of their own. Whole messages are stored, then forwarded.
/// Not played: what a rank passes on may overtake a message of another slice to the same peer that is late.
/// One judge for every strategy; deterministic. The plan must be valid.
SimulatedPlan simulatePlan(const ReshardingPlan& plan);
/// The same without the messages' times: what predicted_seconds is.
double simulatedSeconds(const ReshardingPlan& plan, const Network& network);

}  // namespace xmesh::core
