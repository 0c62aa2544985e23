#pragma once

#include <cstdint>
#include <vector>

#include "core/resharding/network.h"
#include "core/resharding/plan.h"

namespace xmesh::core {

/// Which earlier messages each message of a valid plan waits for: those that bring its sender the elements it sends.
/// Row i of a compressed sparse list: messages[first[i] .. first[i + 1]).
struct Dependencies {
  std::vector<int64_t> first;
  std::vector<int32_t> messages;
};

Dependencies dependenciesOf(const ReshardingPlan& plan, const Network& network);

}  // namespace xmesh::core
