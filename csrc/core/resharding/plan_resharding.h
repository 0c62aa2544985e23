#pragma once

#include <vector>

#include "core/resharding/plan.h"
#include "core/resharding/strategy.h"

namespace xmesh::core {

/// Plans a reshard of one or many tensors: checks the inputs, decomposes them into unit tasks, runs the strategy, and computes the lower bound
/// and the predicted time.
/// "auto" tries the registry's candidates and looks at those predicted within 1 % of the least. Among them "send_recv" comes last; then fewest
/// streams on one direction of a NIC win; then the least prediction; then the registry's order. It takes a striped plan of more than 20,000 messages
/// without trying the others: they would cost more planning time than such plans leave to gain.
/// A pure function: every rank and every CPU gets the same plan, and plan.strategy is the canonical text of the strategy that made it.
/// Throws InvalidArgument naming the tensor: shape or dtype that differ between source and destination, a Partial destination, a spec that is
/// not valid by itself, a rank that the topology lacks. Builds without NDEBUG validate every plan.
ReshardingPlan planResharding(std::vector<TensorPair> tensors, Topology topology, const Strategy& strategy);

/// Throws what planResharding throws for bad inputs, without planning.
void checkReshard(const std::vector<TensorPair>& tensors, const Topology& topology);

}  // namespace xmesh::core
