// How the executor posts its sends: in plan order to each peer and track, packed where a range is not one run in memory.
#include <cstring>
#include <iterator>
#include <utility>

#include "runtime/host/host_executor.h"

namespace xmesh::runtime {

/// Goes on in the track of a send.
void HostExecutor::postSendsLike(int32_t send) {
  int32_t& next = nextSendLike(send);
  while (next >= 0 && num_deps_[static_cast<size_t>(next)] == 0 && postSend(next)) {
    next = program_->sends[static_cast<size_t>(next)].next_of_track;
  }
}

/// The first send in plan order that must be packed and is not posted, or -1.
int32_t HostExecutor::firstStagedSend() {
  for (; next_staged_send_ < staged_sends_.size(); ++next_staged_send_) {
    const int32_t first = staged_sends_[next_staged_send_];
    const int32_t next = nextSendLike(first);
    if (next >= 0 && next <= first) {
      return first;
    }
  }
  return -1;
}

/// Goes on where the first send that must be packed may have been held up.
void HostExecutor::postStagedSends() {
  for (int32_t first = firstStagedSend(); first >= 0;) {
    postSendsLike(first);
    const int32_t next = firstStagedSend();
    if (next == first) {
      return;
    }
    first = next;
  }
}

/// Goes on, in plan order, where ready sends found no memory or were put off.
void HostExecutor::postHeldUpSends() {
  for (auto held = held_up_sends_.begin(); held != held_up_sends_.end();) {
    const int32_t index = *held;
    int32_t& next = nextSendLike(index);
    if (next == index && givesWay(index)) {
      putOff(index);
      ++held;
      continue;
    }
    held = held_up_sends_.erase(held);
    if (next != index) {
      continue;
    }
    if (!postSend(index)) {
      return;
    }
    next = program_->sends[static_cast<size_t>(index)].next_of_track;
    if (next >= 0 && num_deps_[static_cast<size_t>(next)] == 0) {
      held_up_sends_.insert(next);
      held = held_up_sends_.upper_bound(index);
    }
  }
  staging_.withdraw(StagingKind::kSendAhead);
}

void HostExecutor::postWaitingSends() {
  postStagedSends();
  postHeldUpSends();
}

/// Memory to pack a ready send into, or an empty buffer: then it is held up. The first send in plan order waits for memory of its own (StagingPool
/// says why); whatever is ready takes what there is for overtaking.
StagingBuffer HostExecutor::acquireSend(int32_t index, int64_t num_bytes) {
  const bool is_first = firstStagedSend() == index;
  StagingBuffer buffer = is_first ? staging_.acquire(StagingKind::kSend, num_bytes) : StagingBuffer{};
  if (buffer) {
    return buffer;
  }
  buffer = staging_.acquire(StagingKind::kSendAhead, num_bytes);
  if (!buffer) {
    held_up_sends_.insert(index);
  } else if (is_first) {
    staging_.withdraw(StagingKind::kSend);
  }
  return buffer;
}

/// Whether a ready send must be packed, but others have been for long enough.
bool HostExecutor::givesWay(int32_t index) const {
  return packed_bytes_ >= kSliceBytes && sendSource(program_->sends[static_cast<size_t>(index)]) == nullptr;
}

void HostExecutor::putOff(int32_t index) {
  held_up_sends_.insert(index);
  if (!std::exchange(will_pack_, true)) {
    handleSoon({EventKind::kPack, 0});
  }
}

bool HostExecutor::postSend(int32_t index) {
  const SendStep& step = program_->sends[static_cast<size_t>(index)];
  const std::byte* data = sendSource(step);
  if (data == nullptr) {
    if (givesWay(index)) {
      putOff(index);
      return false;
    }
    StagingBuffer& buffer = send_buffers_[static_cast<size_t>(index)];
    buffer = acquireSend(index, program_->numBytes(step));
    if (!buffer) {
      return false;
    }
    pack(index, buffer);
    data = buffer.data;
  } else if (step.reduction < 0) {
    unpackRangeOf(step);
  }
  transport_.send(operationOf(step.track), group_rank_of_peer_[static_cast<size_t>(step.peer)], data, program_->numBytes(step), index);
  return true;
}

/// Fills a send's buffer. What just came in packed is not packed again: the first send of the same range and its arrival change buffers, others copy.
void HostExecutor::pack(int32_t index, StagingBuffer& buffer) {
  const SendStep& step = program_->sends[static_cast<size_t>(index)];
  const int64_t item_bytes = program_->boxes[static_cast<size_t>(step.box)].item_bytes;
  const auto found = packedArrivalOf(step);
  if (found != packed_arrivals_.end()) {
    PackedArrival& arrival = found->second;
    const ReceiveStep& receive = program_->receives[static_cast<size_t>(arrival.receive)];
    StagingBuffer& received = receive_buffers_[static_cast<size_t>(arrival.receive)];
    if (arrival.send < 0 && receive.begin == step.begin && receive.end == step.end && received.capacity == buffer.capacity) {
      std::swap(received.data, buffer.data);
      staging_.release(received);
      arrival.send = index;
      return;
    }
    std::memcpy(buffer.data, arrival.data + (step.begin - receive.begin) * item_bytes, static_cast<size_t>(program_->numBytes(step)));
  } else {
    unpackRangeOf(step);
    packRange(boxOf(step.box), step.begin, step.end, item_bytes, buffer.data);
  }
  packed_bytes_ += program_->numBytes(step);
}

/// The packed arrival that holds all elements of a send, or the end.
HostExecutor::PackedArrivals::iterator HostExecutor::packedArrivalOf(const SendStep& step) {
  const auto after = packed_arrivals_.upper_bound({step.box, step.begin});
  if (after == packed_arrivals_.begin()) {
    return packed_arrivals_.end();
  }
  const auto arrival = std::prev(after);
  const ReceiveStep& receive = program_->receives[static_cast<size_t>(arrival->second.receive)];
  return receive.box == step.box && step.end <= receive.end ? arrival : packed_arrivals_.end();
}

/// Unpacks what a send reads from the destination tensor.
void HostExecutor::unpackRangeOf(const SendStep& step) {
  auto arrival = packed_arrivals_.lower_bound({step.box, step.begin});
  if (arrival != packed_arrivals_.begin()) {
    const auto before = std::prev(arrival);
    const ReceiveStep& receive = program_->receives[static_cast<size_t>(before->second.receive)];
    if (receive.box == step.box && step.begin < receive.end) {
      arrival = before;
    }
  }
  while (arrival != packed_arrivals_.end() && arrival->first < PackedArrivals::key_type(step.box, step.end)) {
    const auto next = std::next(arrival);
    unpack(arrival);
    arrival = next;
  }
}

/// Where a message's bytes lie in one run, or null.
const std::byte* HostExecutor::sendSource(const SendStep& step) const {
  return step.reduction >= 0 ? reductions_.accumulator(step.reduction)
                             : contiguousRun(boxOf(step.box), step.begin, step.end, program_->boxes[static_cast<size_t>(step.box)].item_bytes);
}

}  // namespace xmesh::runtime
