#pragma once

#include <string>
#include <vector>

#include "core/resharding/plan.h"
#include "core/resharding/strategy.h"

namespace xmesh::core {

/// 128 bits as 32 hex digits over tensors, topology, strategy and every message: equal plans have equal fingerprints on every CPU. Not cryptographic.
std::string planFingerprint(const ReshardingPlan& plan);

/// The same over what a plan is made from: a key for caches.
std::string inputsFingerprint(const std::vector<TensorPair>& tensors, const Topology& topology, const Strategy& strategy);

}  // namespace xmesh::core
