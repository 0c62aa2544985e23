#pragma once

#include <cstddef>
#include <vector>

#include "core/parallelism/bucket_elimination.h"

namespace xmesh::core {

/// By node, the choices that are left, ascending, once those are gone that another choice of the node can always replace at no higher cost, whatever
/// its neighbors choose (R. Goldstein, Efficient rotamer elimination applied to protein side-chains, Biophysical Journal 66, 1994). Some cheapest
/// choices of all nodes are among them. Of two that can replace each other the first is left. Empty for a node of which nothing can be chosen.
std::vector<std::vector<size_t>> undominatedChoices(const PairwiseCosts& problem);

/// The problem of these choices alone.
PairwiseCosts restricted(const PairwiseCosts& problem, const std::vector<std::vector<size_t>>& choices);

}  // namespace xmesh::core
