#include "core/parallelism/collective_cost.h"

namespace xmesh::core {
namespace {

double alpaCost(Collective collective, double num_bytes, const AxisLinks& links) {
  const auto n = static_cast<double>(links.size);
  if (links.size == 1) {
    return 0;
  }
  const double sent = links.seconds_per_byte * (n - 1) / n * num_bytes;
  switch (collective) {
    case Collective::kAllReduce:
      return links.latency + 2 * sent + 0.01;
    case Collective::kAllGather:
      return links.latency + sent + 0.1;
    case Collective::kReduceScatter:
      return links.latency + sent + 0.001;
    case Collective::kAllToAll:
      return links.latency + sent / n * (n / 2) + 0.001;  // half of n: its penalty for congestion
  }
  return 0;
}

}  // namespace

CollectiveCostModel alpaCosts() { return {"alpa", "alpha + beta times what a device sends, as Alpa's search has it", alpaCost}; }

}  // namespace xmesh::core
