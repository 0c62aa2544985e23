#include "core/resharding/striped/port_matching.h"

#include <cstddef>
#include <limits>

namespace xmesh::core {

std::vector<int32_t> heaviestMatching(const std::vector<std::vector<double>>& weights) {
  const size_t num_rows = weights.size();
  const size_t num_real = num_rows > 0 ? weights[0].size() : 0;
  const size_t num_columns = num_real + num_rows;  // one spare column per row stands for "not matched"
  std::vector<double> row_price(num_rows + 1, 0);
  std::vector<double> column_price(num_columns + 1, 0);
  std::vector<size_t> row_of(num_columns + 1, 0);  // index 0 is the row being entered; rows and columns count from 1
  std::vector<size_t> previous(num_columns + 1, 0);
  for (size_t row = 1; row <= num_rows; ++row) {
    row_of[0] = row;
    size_t column = 0;
    std::vector<double> least(num_columns + 1, std::numeric_limits<double>::infinity());
    std::vector<bool> is_used(num_columns + 1, false);
    do {
      is_used[column] = true;
      const size_t from = row_of[column];
      double delta = std::numeric_limits<double>::infinity();
      size_t next = 0;
      for (size_t j = 1; j <= num_columns; ++j) {
        if (is_used[j]) {
          continue;
        }
        const double weight = j <= num_real && weights[from - 1][j - 1] > 0 ? weights[from - 1][j - 1] : 0;
        const double cost = -weight - row_price[from] - column_price[j];
        if (cost < least[j]) {
          least[j] = cost;
          previous[j] = column;
        }
        if (least[j] < delta) {
          delta = least[j];
          next = j;
        }
      }
      for (size_t j = 0; j <= num_columns; ++j) {
        if (is_used[j]) {
          row_price[row_of[j]] += delta;
          column_price[j] -= delta;
        } else {
          least[j] -= delta;
        }
      }
      column = next;
    } while (row_of[column] != 0);
    while (column != 0) {
      row_of[column] = row_of[previous[column]];
      column = previous[column];
    }
  }
  std::vector<int32_t> out(num_rows, -1);
  for (size_t j = 1; j <= num_real; ++j) {
    if (row_of[j] != 0 && weights[row_of[j] - 1][j - 1] > 0) {
      out[row_of[j] - 1] = static_cast<int32_t>(j - 1);
    }
  }
  return out;
}

}  // namespace xmesh::core
