#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/resharding/plan.h"
#include "runtime/memory/box_copy.h"
#include "runtime/memory/reduce.h"
#include "runtime/program/message_groups.h"
#include "runtime/program/tracks.h"

namespace xmesh::runtime {

/// Part of what the ranks of a plan must agree on: it decides how messages are cut.
struct ProgramOptions {
  /// No message is longer, longer ones are cut (at least one element each). At most an eighth of the staging bound keeps executors inside the bound.
  int64_t max_message_bytes = int64_t{4} << 20;
  bool broadcasts = false;                           ///< values go in broadcasts: see BroadcastStars
  std::optional<GroupLimits> groups = std::nullopt;  ///< with them messages are put into groups: see messageGroups()
};

/// Where a task's box lies in this rank's part of a tensor.
struct SliceBox {
  int32_t tensor = 0;   ///< which of this rank's local tensors
  bool is_src = false;  ///< of the source, else of the destination
  int64_t item_bytes = 0;
  std::array<int64_t, kMaxDims> offsets{};
  std::array<int64_t, kMaxDims> extents{};
};

/// One message out: elements [begin, end) of a slice.
struct SendStep {
  int32_t peer = 0;            ///< index in Program::peers()
  int32_t box = -1;            ///< index in boxes; -1 for a partial sum
  int32_t reduction = -1;      ///< whose accumulator is sent as partial sum, an index in reductions; else -1
  int32_t num_deps = 0;        ///< arrivals that must come first
  int32_t track = 0;           ///< see trackOf
  int32_t next_of_track = -1;  ///< the next send to the same peer in the same track
  int32_t circle = -1;         ///< whose broadcast it belongs to, an index in circles; its other sends are its neighbors
  int32_t group = 0;           ///< see messageGroups()
  int64_t position = 0;        ///< in the plan's order over sends and receives
  int64_t begin = 0;
  int64_t end = 0;
};

/// One message in. A value goes where its slice lies; a contribution or a partial sum goes to its reduction.
struct ReceiveStep {
  int32_t peer = 0;
  int32_t box = -1;
  int32_t track = 0;
  bool is_sum = false;
  int32_t reduction = -1;  ///< index in reductions, or -1 for a value
  int32_t arrival = -1;    ///< told when a value has arrived
  int32_t circle = -1;     ///< as SendStep's
  int32_t group = 0;       ///< as SendStep's
  int64_t position = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

/// Elements [begin, end) of a task, reduced here. Receives first_receive, first_receive + 1, ... bring contributions and partial sums in the order
/// in which they are added; the own contribution comes after `own_after` of them. The result is the value of a destination slice, or without one
/// a partial sum that the next step in plan order sends.
struct ReduceStep {
  int32_t box = -1;
  int32_t own_box = -1;  ///< in the source's local tensor, or -1 when this rank holds no contribution
  int32_t own_after = -1;
  int32_t first_receive = 0;
  int32_t num_receives = 0;
  int32_t arrival = 0;
  int64_t begin = 0;
  int64_t end = 0;
  Reduction reduction;
};

/// Elements that this rank holds and needs.
struct CopyStep {
  int32_t src_box = 0;
  int32_t dst_box = 0;
  int64_t num_elements = 0;
};

/// What one rank does for one plan; immutable, shared between calls and threads. Made by compileProgram.
///
/// Order: the plan's, except that all contributions of one (task, receiver) move up to the first of them, are cut at the union of their cuts, and
/// come range by range in contribution order; this keeps at most one range's accumulator waiting. A contribution depends on nothing, so
/// moving it up is always allowed. Of a task with partial sums each range's whole tree moves up to its first message: sums depend on contributions
/// only. So what a rank receives for a sum and then the sum itself are neighbors in its order, and between any two ranks' messages of a tree there
/// are only messages of the same tree. Every rank derives the same order from the same plan and options.
class Program {
 public:
  static size_t trackIndex(int32_t peer, int32_t track) { return static_cast<size_t>(peer * kNumTracks + track); }

  int64_t globalRank() const { return global_rank; }
  /// Whether its messages are in groups.
  bool hasGroups() const { return has_groups; }
  /// Ascending global ranks that this rank exchanges messages with.
  const std::vector<int64_t>& peers() const { return peer_ranks; }
  int64_t numSends() const { return static_cast<int64_t>(sends.size()); }
  int64_t numReceives() const { return static_cast<int64_t>(receives.size()); }
  /// How many local tensors this rank gives at either end. Of a tensor on a mesh there is one; of a tensor in boxes one for each box of this rank,
  /// in the order of the spec's boxes.
  int64_t numSources() const { return static_cast<int64_t>(src_shapes.size()); }
  int64_t numDestinations() const { return static_cast<int64_t>(dst_shapes.size()); }
  /// Shape that a local tensor must have on this rank; nothing when the rank is not in the source (destination) mesh.
  const std::optional<std::vector<int64_t>>& srcShape(int64_t local) const { return src_shapes.at(static_cast<size_t>(local)); }
  const std::optional<std::vector<int64_t>>& dstShape(int64_t local) const { return dst_shapes.at(static_cast<size_t>(local)); }
  /// Throws InvalidArgument naming tensor and rank when a local tensor is missing, or its shape or strides do not fit.
  void checkLocalTensors(const std::vector<LocalTensor>& src, const std::vector<LocalTensor>& dst) const;

  int64_t numBytes(const SendStep& step) const {
    return (step.end - step.begin) * (step.reduction < 0 ? boxes[static_cast<size_t>(step.box)].item_bytes
                                                         : reductions[static_cast<size_t>(step.reduction)].reduction.accumulatorItemBytes());
  }
  int64_t numBytes(const ReceiveStep& step) const;

  int64_t global_rank = 0;
  bool has_groups = false;
  std::vector<int64_t> peer_ranks;
  std::vector<int64_t> receives_of_peer;  ///< by index in peers()
  std::vector<int64_t> sends_of_peer;
  std::vector<int32_t> tracks;               ///< those in use, ascending
  std::vector<int32_t> first_send_of_track;  ///< by trackIndex; -1 when there is none
  std::vector<std::optional<std::vector<int64_t>>> src_shapes;
  std::vector<std::optional<std::vector<int64_t>>> dst_shapes;
  std::vector<int32_t> src_tensors;  ///< by local tensor: the plan's tensor
  std::vector<int32_t> dst_tensors;
  std::vector<std::vector<int64_t>> circles;  ///< ascending global ranks; alike on every rank, also those that it is not in
  std::vector<SliceBox> boxes;
  std::vector<SendStep> sends;
  std::vector<ReceiveStep> receives;
  std::vector<ReduceStep> reductions;
  std::vector<CopyStep> copies;
  /// Sends that wait for arrival a: dependents[dependents_begin[a] .. dependents_begin[a + 1]).
  std::vector<int32_t> dependents_begin;
  std::vector<int32_t> dependents;
};

/// What `global_rank` does for `plan`. Throws InvalidArgument naming the message when the plan sends elements that the sender does not have by then,
/// or leaves elements that the rank needs without a value.
std::shared_ptr<const Program> compileProgram(const core::ReshardingPlan& plan, int64_t global_rank, const ProgramOptions& options = {});

}  // namespace xmesh::runtime
