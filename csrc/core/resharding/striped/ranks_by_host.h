#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/resharding/network.h"

namespace xmesh::core {

/// Rows of ranks, grouped by host.
class RanksByHost {
 public:
  explicit RanksByHost(const Network& network) : network_(network), first_{0} {}
  /// Adds a row of ascending global ranks; rows are numbered from 0.
  void addRow(const std::vector<int64_t>& ranks);
  /// The row's ranks on a host, ascending.
  std::span<const int64_t> at(int64_t row, int32_t host) const;

 private:
  const Network& network_;
  std::vector<size_t> first_;  ///< by row
  std::vector<int32_t> hosts_;
  std::vector<int64_t> ranks_;
};

}  // namespace xmesh::core
