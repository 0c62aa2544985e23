#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/slice.h"
#include "core/spec.h"
#include "core/topology.h"

namespace xmesh::core {

/// One tensor of a reshard: the same shape and dtype on two meshes.
struct TensorPair {
  TensorSpec src;
  TensorSpec dst;
  bool operator==(const TensorPair&) const = default;
};

/// Who holds a slice. contributions[i] lists the global ranks (ascending) that hold the i-th contribution; there is one contribution unless the
/// source is Partial. Contributions are ordered by the coordinates of the Partial axes, row-major: the order in which they are reduced.
struct Holders {
  std::vector<std::vector<int64_t>> contributions;
  bool operator==(const Holders&) const = default;
};

/// One slice of one tensor: a box of the common refinement of source and destination tiles. `holders` and `needers` index the plan's tables.
struct UnitTask {
  int64_t tensor = 0;
  Box box;
  int64_t holders = 0;
  int64_t needers = 0;
  bool operator==(const UnitTask&) const = default;
};

/// What a message carries.
enum class Payload : uint8_t {
  kValue,         ///< the slice's final value
  kContribution,  ///< the sender's own contribution, for a receiver that reduces
  kPartialSum,    ///< the sender's reduction, in the accumulator's type, of its own contribution and all that it received for these elements so far
};

/// One chunk on one hop: elements [begin, end) of the task's box in row-major order, from src_rank to dst_rank (global ranks).
/// A kValue sender holds the (only) contribution, or has received the elements as kValue earlier in the plan, or has received every
/// contribution but its own earlier in the plan; then it needs the task, as a kValue receiver always does.
/// A kContribution or kPartialSum message's receiver needs the task or holds a contribution to it. A kPartialSum sender has received something, is
/// none that reduces the value, and has given these elements away: it neither sends its contribution to them afterwards nor receives others. Where it
/// needs them, it receives their value later. No contribution comes into a reduction twice.
struct Message {
  int64_t task = 0;
  int64_t begin = 0;
  int64_t end = 0;
  int32_t src_rank = 0;
  int32_t dst_rank = 0;
  int32_t contribution = 0;  ///< index in Holders::contributions; meaningful for kContribution
  Payload payload = Payload::kValue;
  bool operator==(const Message&) const = default;
};

/// "value", "contribution 2", "partial sum"
std::string payloadStr(const Message& message);

/// What moves where in which order, for one or many tensors. Immutable once validated; equal on every rank and CPU for equal inputs.
/// The message list is one total order; a rank sends and receives its own messages in that order, so executing it cannot deadlock.
/// Elements that a rank both holds (as sole contribution) and needs are copied locally and appear in no message.
struct ReshardingPlan {
  std::string strategy;
  std::vector<TensorPair> tensors;
  Topology topology;
  std::vector<Holders> holders;
  std::vector<std::vector<int64_t>> needers;  ///< ascending global ranks
  std::vector<UnitTask> tasks;
  std::vector<Message> messages;
  int64_t lower_bound_bytes = 0;  ///< most bytes that some host's NIC must carry one way
  double lower_bound_seconds = 0;
  double predicted_seconds = 0;

  int64_t itemBytes(const UnitTask& task) const { return tensors[static_cast<size_t>(task.tensor)].src.dtype.item_bytes; }
  int64_t accumulatorItemBytes(const UnitTask& task) const { return tensors[static_cast<size_t>(task.tensor)].src.dtype.accumulatorItemBytes(); }
  int64_t numBytes(const Message& message) const {
    const UnitTask& task = tasks[static_cast<size_t>(message.task)];
    return (message.end - message.begin) * (message.payload == Payload::kPartialSum ? accumulatorItemBytes(task) : itemBytes(task));
  }
  /// Whether the message carries a value that its sender holds from the start.
  bool isSentByHolder(const Message& message) const;
  /// Ascending global ranks of either mesh of any tensor.
  std::vector<int64_t> participants() const;
  /// NIC bytes per host index (messages inside a host do not count).
  std::map<int64_t, int64_t> bytesSent() const;
  std::map<int64_t, int64_t> bytesReceived() const;
};

}  // namespace xmesh::core
