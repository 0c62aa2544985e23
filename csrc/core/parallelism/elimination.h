#pragma once

#include <cstddef>
#include <vector>

#include "core/parallelism/strategy_graph.h"

namespace xmesh::core {

/// The choices that cost least together. Of equal ones always the same, on every machine. Throws InvalidArgument, which names a node, where all cost
/// kForbidden.
///
/// Nodes are eliminated one by one (as a partitioned boolean quadratic problem's; L. Hames and B. Scholz, Nearly Optimal Register Allocation with
/// PBQP, JMLC 2006, whose rules for degrees 0, 1 and 2 are exact): a node's cheapest choice for each pair of its neighbors' becomes a table between
/// these. Models are series-parallel graphs, or nearly, of which nothing is left then. Of what is left (a mixture of experts' gates) nodes of more
/// neighbors go the same way, with tables over all of these (leastByBuckets). Where those would be too large, the node with most neighbors gets each
/// of its choices in turn, and the rest is solved for it: branch and bound. All of that is exact.
///
/// A graph in which many nodes have many neighbors (a scan over tokens, in which all read the same few tensors) takes that too long, also without the
/// choices that others dominate. There the nodes of most neighbors choose in turn, beside each other's choices, and the rest exactly with each, until
/// none gets better: is_exact is false. The limits are numbers of table cells and of branches, the same on every machine. Where too many choices are
/// forbidden for a descent to begin, a search of so many branches is made; that, too, may end without the best, or with nothing.
ShardingChoices leastCost(const StrategyGraph& graph);

/// What is least over all nodes but two, for each pair of choices of these: rows are those of `first`. The costs of `first` and `second` themselves
/// are no part of it, so that tables of parts that meet in one node can be multiplied (minPlusProduct) once its costs are added. Throws
/// InvalidArgument for a graph that degrees 0 to 2 do not reduce to the two.
CostTable costBetween(const StrategyGraph& graph, size_t first, size_t second);

}  // namespace xmesh::core
