#include "core/parallelism/cost_table.h"

#include <algorithm>
#include <string>

#include "core/error.h"

namespace xmesh::core {

CostTable minPlusProduct(const CostTable& first, const CostTable& second) {
  require(first.num_columns == second.num_rows, "the second table of a path has a row for each column of the first: got " +
                                                    std::to_string(second.num_rows) + " rows for " + std::to_string(first.num_columns) + " columns");
  CostTable out{first.num_rows, second.num_columns, std::vector<double>(first.num_rows * second.num_columns, kForbidden)};
  for (size_t row = 0; row < first.num_rows; ++row) {
    double* to = out.costs.data() + row * out.num_columns;
    for (size_t middle = 0; middle < first.num_columns; ++middle) {
      const double before = first.at(row, middle);
      const double* after = second.costs.data() + middle * second.num_columns;
      for (size_t column = 0; column < out.num_columns; ++column) {
        to[column] = std::min(to[column], before + after[column]);
      }
    }
  }
  return out;
}

}  // namespace xmesh::core
