#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/memory/box_copy.h"
#include "runtime/program/program.h"
#include "runtime/stream/stream_kernels.h"
#include "transport/stream_transport.h"

namespace xmesh::runtime {

/// Puts one rank's program on the in-order stream of a StreamTransport: its groups of messages, packing before each group, unpacking
/// and accumulating behind it.
///
/// The program's groups are alike on all ranks and cannot deadlock: see messageGroups(). All pairs are connected before the first group, so no group
/// waits for another on the host.
///
/// One accumulator is enough: a rank's messages of one reduction are neighbors among those of its reductions, a partial sum's send behind what it is
/// made of. Whatever fills the accumulator again is received in the send's group or later and accumulated behind it, when the stream has passed the
/// send.
///
/// Threading: one thread, the transport's caller; nothing blocks. Ownership: this object, the tensors, the staging memory, the kernels and the
/// transport must live until the stream has passed everything enqueued.
class StreamExecutor {
 public:
  /// As HostExecutor's; the program has groups. `circles` are the transports of the program's circles, on the same stream; null for those of others.
  /// Throws InvalidArgument when shapes are not what the plan says.
  StreamExecutor(std::shared_ptr<const Program> program, transport::StreamTransport& transport, std::vector<int32_t> group_rank_of_peer,
                 const std::vector<LocalTensor>& src, const std::vector<LocalTensor>& dst, const StreamKernels& kernels,
                 std::vector<transport::StreamTransport*> circles = {});
  StreamExecutor(const StreamExecutor&) = delete;
  StreamExecutor& operator=(const StreamExecutor&) = delete;

  /// Staging memory that enqueue() must be given; aligned to 64 bytes; zero when everything moves in place.
  int64_t stagingBytes() const { return staging_bytes_; }
  int64_t numGroups() const { return static_cast<int64_t>(groups_.size()); }
  /// Enqueues the whole program. Once.
  void enqueue(void* staging);

 private:
  /// A send or a receive with its offset in staging memory, or -1 when it moves in place.
  struct Item {
    bool is_send = false;
    int32_t index = 0;  ///< the first of them, of a broadcast
    int32_t circle = -1;
    int32_t group = 0;
    int64_t staging_offset = -1;
  };
  /// Items of one group and pair that travel as one.
  struct Transfer {
    bool is_send = false;
    int32_t peer = 0;   ///< the transport's rank
    size_t first = 0;   ///< item
    int64_t bytes = 0;  ///< from the first item's memory on
  };
  struct Group {
    size_t begin = 0;  ///< items [begin, end)
    size_t end = 0;
    std::vector<Transfer> transfers;  ///< empty for a broadcast
    bool has_packs = false;
    bool has_unpacks = false;
  };

  void orderItems();
  void collectWays();
  void collectGroups();
  void collectTransfers(Group& group, int64_t staging_offset);
  bool isStaged(const Item& item) const;
  int64_t numBytes(const Item& item) const;
  int32_t peerOf(const Item& item) const;
  int64_t itemBytes(int32_t box) const { return program_->boxes[static_cast<size_t>(box)].item_bytes; }
  const StridedBox& boxOf(int32_t box) const { return boxes_[static_cast<size_t>(box)]; }
  void enqueueGroup(const Group& group);
  void enqueueBroadcast(const Item& item);
  std::byte* receiveTarget(const Item& item) const;
  const std::byte* sendSource(const Item& item) const;
  void packGroup(void* stream, const Group& group) const;
  void unpackGroup(void* stream, const Group& group) const;
  void copyLocally(void* stream) const;
  void takeContribution(std::vector<ReductionPart>& parts, int32_t receive, std::byte* data) const;
  void reduceParts(void* stream, const std::vector<ReductionPart>& parts) const;
  std::byte* accumulatorOf(const ReduceStep& step) const;

  std::shared_ptr<const Program> program_;
  transport::StreamTransport& transport_;
  std::vector<int32_t> group_rank_of_peer_;
  std::vector<transport::StreamTransport*> circles_;  ///< by the program's circles; null where this rank is in none
  const StreamKernels& kernels_;
  std::vector<StridedBox> boxes_;  ///< by slice box
  std::vector<Item> items_;        ///< by group, then in plan order
  std::vector<int32_t> send_to_;   ///< the transport's ranks, ascending; without broadcasts
  std::vector<int32_t> receive_from_;
  std::vector<Group> groups_;
  int64_t staging_bytes_ = 0;
  std::byte* staging_ = nullptr;
};

}  // namespace xmesh::runtime
