#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/resharding/broadcast/unit_task_order.h"

namespace xmesh::core {

/// One sender host per task. "naive": the first holder (AlpaComm's naive algorithm). "size": tasks by size descending, each to the holder with
/// the least to send so far (AlpaComm, Eq. 4); ties: the lower task, the lower host. `rates` weighs the hosts' loads.
std::vector<int32_t> assignSenders(const std::vector<HostTask>& tasks, const std::vector<int64_t>& rates, const std::string& method);

}  // namespace xmesh::core
