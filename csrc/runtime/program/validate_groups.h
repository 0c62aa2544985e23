#pragma once

#include <cstdint>
#include <vector>

#include "core/resharding/plan.h"

namespace xmesh::runtime {

/// Checks the rules of messageGroups(), its limits of bytes apart, from the groups alone. Throws InvalidArgument that names the messages that would
/// wait for each other on an in-order device, or what a message needs and does not have when its group begins.
void validateGroups(const core::ReshardingPlan& plan, const std::vector<core::Message>& ordered, const std::vector<int32_t>& circle_of,
                    const std::vector<int32_t>& groups);

}  // namespace xmesh::runtime
