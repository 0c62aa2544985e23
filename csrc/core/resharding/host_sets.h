#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/resharding/network.h"
#include "core/resharding/plan.h"

namespace xmesh::core {

/// Sets of dense host indices of a plan's tables. Rows with equal sets have equal ids, numbered from 0 in order of the rows.
struct HostSets {
  explicit HostSets(const ReshardingPlan& plan, const Network& network);
  std::vector<std::vector<std::vector<int32_t>>> holders;  ///< [Holders index][contribution], ascending, each host once
  std::vector<std::vector<int32_t>> needers;               ///< [needers index], ascending, each host once
  std::vector<int32_t> holder_ids;                         ///< [Holders index]
  std::vector<int32_t> needer_ids;                         ///< [needers index]
  int32_t num_holder_ids = 0;
  int32_t num_needer_ids = 0;
};

/// Numbers pairs of small numbers in the order in which they are first seen.
class PairIndex {
 public:
  /// Fast for first members below `num_first` and second ones below `num_second`, where a table of both is not too large; right for all.
  PairIndex(int64_t num_first, int64_t num_second);
  /// The pair's number, and whether it is new.
  std::pair<int32_t, bool> idOf(int32_t first, int32_t second);

 private:
  int64_t num_first_ = 0;
  int64_t num_second_ = 0;
  int32_t size_ = 0;
  std::vector<int32_t> table_;  ///< [first * num_second + second], -1 where not seen
  std::unordered_map<int64_t, int32_t> others_;
};

/// Keeps each of many sets of hosts once. Spans are valid while the table lives, moved or not.
class HostSetTable {
 public:
  int32_t idOf(const std::vector<int32_t>& hosts);
  std::span<const int32_t> at(int32_t id) const { return *sets_[static_cast<size_t>(id)]; }

 private:
  std::map<std::vector<int32_t>, int32_t> ids_;
  std::vector<const std::vector<int32_t>*> sets_;
};

}  // namespace xmesh::core
