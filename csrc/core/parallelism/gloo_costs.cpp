#include "core/parallelism/collective_cost.h"

namespace xmesh::core {
namespace {

double glooCost(Collective collective, double num_bytes, const AxisLinks& links) {
  static const CollectiveCostModel ring = ringCosts();
  return ring.cost(collective == Collective::kReduceScatter ? Collective::kAllReduce : collective, num_bytes, links);
}

}  // namespace

CollectiveCostModel glooCosts() { return {"gloo", "rings, of which a reduce-scatter costs an all-reduce", glooCost}; }

}  // namespace xmesh::core
