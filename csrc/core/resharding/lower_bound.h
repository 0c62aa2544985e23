#pragma once

#include <cstdint>

#include "core/resharding/network.h"
#include "core/resharding/plan.h"

namespace xmesh::core {

/// What no plan can go below: `bytes` that some host's NIC must carry one way, `seconds` for which some host or set of hosts must send or receive.
struct LowerBound {
  int64_t bytes = 0;
  double seconds = 0;
};

/// With slice i of s_i bytes, the hosts S_i that hold it, the hosts D_i that need it, and the rate B_h of host h each way:
///   LB-in  = max over hosts h of sum of s_i over {i: h in D_i \ S_i} / B_h
///   LB-out = max over host sets U of sum of s_i over {i: S_i inside U, D_i not inside S_i} / sum of B_h over U.
/// A Partial slice: a needing host that misses a contribution receives >= s_i; the holders H_c of contribution c send >= s_i unless H_c holds all
/// needing hosts. Contributions whose holders are disjoint send each its own; those that overlap might be sent as one, so a family
/// of disjoint H_c counts, the smallest first. `bytes` is the same with all rates 1, per host of U rounded up.
/// Reads tensors, topology, tables and tasks of the plan, never its messages.
LowerBound lowerBound(const ReshardingPlan& plan, const Network& network);

}  // namespace xmesh::core
