#pragma once

#include <cstdint>
#include <string>

#include "core/resharding/plan.h"

namespace xmesh::core {

/// A plan as a table for a human: tensors, strategy, lower bound and prediction, bytes out and in per host, the first messages.
std::string planStr(const ReshardingPlan& plan, int64_t max_messages = 8);

/// "1.50 GiB", "12.0 KiB", "7 B"
std::string bytesStr(int64_t num_bytes);
/// "1.250 s", "3.200 ms", "17.0 us"
std::string secondsStr(double seconds);

}  // namespace xmesh::core
