#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace xmesh::core {

enum class PlacementKind { kReplicate, kShard, kStridedShard, kPartial };
enum class ReduceOp { kSum, kAvg, kMin, kMax, kProduct };

/// How one mesh axis places a tensor: torch.distributed.tensor's Replicate, Shard, _StridedShard and Partial. A plain value.
struct Placement {
  PlacementKind kind = PlacementKind::kReplicate;
  int64_t dim = 0;                      ///< for Shard and StridedShard, not negative
  int64_t split_factor = 1;             ///< for StridedShard: into how many parts axes further right have split dim before this one
  ReduceOp reduce_op = ReduceOp::kSum;  ///< for Partial

  static Placement replicate() { return {}; }
  static Placement shard(int64_t dim) { return {PlacementKind::kShard, dim}; }
  static Placement stridedShard(int64_t dim, int64_t split_factor) { return {PlacementKind::kStridedShard, dim, split_factor}; }
  static Placement partial(ReduceOp op) { return {PlacementKind::kPartial, 0, 1, op}; }
  /// Reads what str() writes; also "S0", "R". Throws InvalidArgument naming the text.
  static Placement parse(std::string_view text);

  bool isShard() const { return kind == PlacementKind::kShard || kind == PlacementKind::kStridedShard; }
  /// "Replicate()", "Shard(0)", "StridedShard(0, 2)", "Partial(sum)"
  std::string str() const;
  bool operator==(const Placement&) const = default;
};

std::string_view reduceOpName(ReduceOp op);
/// Throws InvalidArgument for anything but sum, avg, min, max, product.
ReduceOp parseReduceOp(std::string_view name);

}  // namespace xmesh::core
