#pragma once

#include <cstdint>
#include <vector>

#include "core/resharding/host_sets.h"
#include "core/resharding/network.h"

namespace xmesh::core {

/// Chooses which needer of a Partial slice reduces it: the one whose host lacks the fewest contributions, among these one that holds a
/// contribution itself, among these the one with the least bytes to reduce so far; ties: the lowest rank.
class ReducerChoice {
 public:
  ReducerChoice(const ReshardingPlan& plan, const Network& network)
      : plan_(plan), network_(network), hosts_(plan, network), rank_bytes_(static_cast<size_t>(network.numRanks())) {}

  /// Global rank; counts the slice's bytes.
  int64_t choose(size_t task);

 private:
  const ReshardingPlan& plan_;
  const Network& network_;
  HostSets hosts_;
  std::vector<int64_t> rank_bytes_;
};

}  // namespace xmesh::core
