#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/resharding/decompose.h"
#include "core/resharding/plan.h"

namespace xmesh::replay {

inline core::Mesh lineMesh(std::vector<int64_t> ranks) {
  const auto extent = static_cast<int64_t>(ranks.size());
  return core::Mesh({extent}, std::move(ranks));
}

inline core::TensorSpec lineSpec(std::vector<int64_t> shape, const char* dtype, std::vector<int64_t> ranks, core::Placement placement) {
  return {std::move(shape), core::DType::parse(dtype), lineMesh(std::move(ranks)), {placement}};
}

/// A decomposed plan without messages; every rank up to the largest is in the topology.
inline core::ReshardingPlan emptyPlan(std::vector<core::TensorPair> tensors) {
  core::ReshardingPlan plan;
  plan.strategy = "by hand";
  plan.tensors = std::move(tensors);
  plan.topology = core::Topology::uniform(plan.participants().back() + 1, 2);
  core::decompose(plan);
  return plan;
}

inline core::Message valueMessage(int64_t task, int64_t begin, int64_t end, int32_t src, int32_t dst) {
  return {task, begin, end, src, dst, 0, core::Payload::kValue};
}

inline core::Message contributionMessage(int64_t task, int64_t begin, int64_t end, int32_t src, int32_t dst, int32_t contribution) {
  return {task, begin, end, src, dst, contribution, core::Payload::kContribution};
}

inline core::Message sumMessage(int64_t task, int64_t begin, int64_t end, int32_t src, int32_t dst) {
  return {task, begin, end, src, dst, 0, core::Payload::kPartialSum};
}

/// Rank 0 replicated to `num_receivers` ranks by a chain of chunks.
inline core::ReshardingPlan chainPlan(int64_t num_elements, int64_t chunk, int64_t num_receivers) {
  std::vector<int64_t> receivers;
  for (int64_t rank = 1; rank <= num_receivers; ++rank) {
    receivers.push_back(rank);
  }
  core::ReshardingPlan plan = emptyPlan({{lineSpec({num_elements}, "float32", {0}, core::Placement::replicate()),
                                          lineSpec({num_elements}, "float32", receivers, core::Placement::replicate())}});
  for (int64_t begin = 0; begin < num_elements; begin += chunk) {
    for (int64_t rank = 0; rank < num_receivers; ++rank) {
      plan.messages.push_back(
          valueMessage(0, begin, std::min(num_elements, begin + chunk), static_cast<int32_t>(rank), static_cast<int32_t>(rank) + 1));
    }
  }
  return plan;
}

/// Shard(0) over `num_src` ranks to Shard(1) over the next `num_dst` ones, one message per task: neither side is one run in memory.
inline core::ReshardingPlan transposePlan(int64_t rows, int64_t columns, int64_t num_src, int64_t num_dst) {
  std::vector<int64_t> src;
  std::vector<int64_t> dst;
  for (int64_t rank = 0; rank < num_src + num_dst; ++rank) {
    (rank < num_src ? src : dst).push_back(rank);
  }
  core::ReshardingPlan plan = emptyPlan(
      {{lineSpec({rows, columns}, "float32", src, core::Placement::shard(0)), lineSpec({rows, columns}, "float32", dst, core::Placement::shard(1))}});
  for (size_t task = 0; task < plan.tasks.size(); ++task) {
    const int64_t from = plan.holders[static_cast<size_t>(plan.tasks[task].holders)].contributions[0][0];
    const int64_t to = plan.needers[static_cast<size_t>(plan.tasks[task].needers)][0];
    plan.messages.push_back(
        valueMessage(static_cast<int64_t>(task), 0, core::numElements(plan.tasks[task].box), static_cast<int32_t>(from), static_cast<int32_t>(to)));
  }
  return plan;
}

}  // namespace xmesh::replay
