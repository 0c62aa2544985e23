#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

namespace xmesh::core {

/// What may not be chosen costs this.
constexpr double kForbidden = std::numeric_limits<double>::infinity();

/// What each pair of choices of two nodes costs, row by row: rows are the first node's choices. Plain value.
struct CostTable {
  size_t num_rows = 0;
  size_t num_columns = 0;
  std::vector<double> costs;  ///< num_rows * num_columns of them

  double at(size_t row, size_t column) const { return costs[row * num_columns + column]; }
  bool operator==(const CostTable&) const = default;
};

/// Most edges of a model are alike: they share one table.
using SharedCostTable = std::shared_ptr<const CostTable>;

/// The table of a path: the least cost over the choices in the middle. Throws InvalidArgument where the sizes do not meet.
CostTable minPlusProduct(const CostTable& first, const CostTable& second);

}  // namespace xmesh::core
