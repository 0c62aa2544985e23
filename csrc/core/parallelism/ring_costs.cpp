#include <algorithm>

#include "core/parallelism/collective_cost.h"

namespace xmesh::core {
namespace {

double ringCost(Collective collective, double num_bytes, const AxisLinks& links) {
  const auto n = static_cast<double>(links.size);
  const double steps = (n - 1) * (links.latency + links.seconds_per_byte * num_bytes / n);
  switch (collective) {
    case Collective::kAllReduce:
      return 2 * steps;
    case Collective::kAllGather:
    case Collective::kReduceScatter:
      return steps;
    case Collective::kAllToAll:  // each device keeps one part of n of what it holds, and sends the others to their places at once
      return (n - 1) * (links.latency + std::max(links.seconds_per_byte, links.exchanged) * num_bytes / n / n);
  }
  return 0;
}

}  // namespace

CollectiveCostModel ringCosts() { return {"ring", "rings of n - 1 steps, as NCCL's for large messages", ringCost}; }

}  // namespace xmesh::core
