#pragma once

#include <cstddef>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "core/parallelism/cost_table.h"

namespace xmesh::core {

/// Nodes with their choices' costs, and tables between pairs of them: what is left of a graph. Plain value.
struct PairwiseCosts {
  struct Edge {
    size_t from = 0;  ///< its choices are the table's rows
    size_t to = 0;
    SharedCostTable table;
  };
  std::vector<std::vector<double>> costs;
  std::vector<Edge> edges;
};

/// How many choices the nodes of a graph have, and which are neighbors. Plain value.
struct BucketSizes {
  std::vector<size_t> num_choices;
  std::vector<std::set<size_t>> neighbors;
};

/// Cells of the tables that leastByBuckets() makes of a graph of these sizes, with the eliminated nodes' choices: of the largest one, and of all
/// together.
struct BucketCells {
  double most = 0;
  double sum = 0;
};
BucketCells bucketCells(BucketSizes sizes);

/// The choices that cost least together, exactly: nodes are eliminated one by one, those first whose neighbors have the fewest choices together, and
/// what a node leaves is a table over all of its neighbors (bucket elimination: R. Dechter, Bucket elimination, Artificial Intelligence 113, 1999).
/// Nothing where a table, with the eliminated node's choices, would have more than `most_cells`; kForbidden where nothing can be chosen.
std::optional<std::pair<std::vector<size_t>, double>> leastByBuckets(const PairwiseCosts& problem, size_t most_cells);

}  // namespace xmesh::core
