#pragma once

#include <string>
#include <string_view>

#include "core/resharding/plan.h"

namespace xmesh::core {

// Schema, version 1. One object with exactly these members:
//   version             1
//   strategy            canonical text of the strategy, "broadcast:naive+naive"
//   topology            {host_of: [[rank, host], ...], nic_of_host: [[host, bytes_per_s], ...],
//                        links: {nic_bytes_per_s, local_bytes_per_s, latency_us, message_us, local_latency_us, is_measured}}
//   tensors             [{shape, dtype, src: {mesh_shape, ranks, placements}, dst: {...}}, ...]; ranks row-major, placements as text
//   holders             [[[rank, ...] per contribution, ...], ...]
//   needers             [[rank, ...], ...]
//   tasks               [[tensor, holders, needers, [[begin, end] per dim, ...]], ...]; holders and needers index the tables above
//   lower_bound_bytes, lower_bound_seconds, predicted_seconds
//   messages            [[task, begin, end, src_rank, dst_rank], ...] in plan order for values, with the contribution's index as a sixth item
//                       for contributions and "partial_sum" for partial sums; begin and end count the elements of the task's box, row-major

/// The plan as JSON, all that is needed to replay it. The same text on every CPU.
std::string planToJson(const ReshardingPlan& plan);

/// Reads what planToJson writes. Throws InvalidArgument naming line, column and field for text that is malformed, truncated or of another schema,
/// and for a plan whose tables do not follow from its tensors or whose messages do not move every element (validatePlan).
ReshardingPlan planFromJson(std::string_view text);

}  // namespace xmesh::core
