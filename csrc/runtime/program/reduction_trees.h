#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/resharding/plan.h"

namespace xmesh::runtime {

/// All messages that bring the contributions to elements [begin, end) of one task to one rank that reduces them, partial sums on the way included.
/// Order: what a rank receives comes before what it sends on, one sum and all below it after the other, in contribution order (a sum counts as its
/// lowest contribution, which its `contribution` names here).
struct ReductionTree {
  size_t first = 0;  ///< in the plan's messages: its first one
  int64_t begin = 0;
  int64_t end = 0;
  std::vector<core::Message> messages;
};

/// Tasks of a plan some of whose contributions travel in partial sums; empty where no task has any.
std::vector<bool> tasksWithSums(const core::ReshardingPlan& plan);

/// The trees of such tasks in which `global_rank` (or, with kEveryRank, any rank) sends or receives something, by first message, then by elements.
/// Every rank derives the same trees in the same order. Throws InvalidArgument naming task and receiver when a tree's contributions are incomplete,
/// come twice or are used after they were given away.
std::vector<ReductionTree> reductionTrees(const core::ReshardingPlan& plan, const std::vector<bool>& has_sums, int64_t global_rank);

}  // namespace xmesh::runtime
