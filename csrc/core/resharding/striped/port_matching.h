#pragma once

#include <cstdint>
#include <vector>

namespace xmesh::core {

/// A matching of rows with columns of greatest total weight (the Hungarian method). weights[row][column]; a weight that is not positive is
/// no edge. Returns the column of each row, or -1. Time rows^2 x (rows + columns); ties are broken alike everywhere.
std::vector<int32_t> heaviestMatching(const std::vector<std::vector<double>>& weights);

}  // namespace xmesh::core
