// How the executor posts its sends: in plan order to each peer, packed where a range is not one run in memory.
#include <utility>

#include "runtime/host_executor.h"

namespace xmesh::runtime {
namespace {

/// Packing gives way to the transport after so many bytes: what is packed leaves while more is.
constexpr int64_t kPackSliceBytes = int64_t{1} << 20;

}  // namespace

void HostExecutor::postSendsTo(int32_t peer) {
  int32_t& next = next_send_[static_cast<size_t>(peer)];
  while (next >= 0 && num_deps_[static_cast<size_t>(next)] == 0 && postSend(next)) {
    next = program_->sends[static_cast<size_t>(next)].next_of_peer;
  }
}

/// The first send in plan order that must be packed and is not posted, or -1.
int32_t HostExecutor::firstStagedSend() {
  for (; next_staged_send_ < staged_sends_.size(); ++next_staged_send_) {
    const int32_t first = staged_sends_[next_staged_send_];
    const int32_t next_of_peer = next_send_[static_cast<size_t>(program_->sends[static_cast<size_t>(first)].peer)];
    if (next_of_peer >= 0 && next_of_peer <= first) {
      return first;
    }
  }
  return -1;
}

/// Goes on where the first send that must be packed may have been held up.
void HostExecutor::postStagedSends() {
  for (int32_t first = firstStagedSend(); first >= 0;) {
    postSendsTo(program_->sends[static_cast<size_t>(first)].peer);
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
    int32_t& next = next_send_[static_cast<size_t>(program_->sends[static_cast<size_t>(index)].peer)];
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
    next = program_->sends[static_cast<size_t>(index)].next_of_peer;
    if (next >= 0 && num_deps_[static_cast<size_t>(next)] == 0) {
      held_up_sends_.insert(next);
      held = held_up_sends_.upper_bound(index);
    }
  }
  pool_.withdraw(StagingKind::kSendAhead, *this);
}

void HostExecutor::postWaitingSends() {
  postStagedSends();
  postHeldUpSends();
}

/// Memory to pack a ready send into, or an empty buffer: then it is held up. The first send in plan order waits for memory of its own (StagingPool
/// says why); whatever is ready takes what there is for overtaking.
StagingBuffer HostExecutor::acquireSend(int32_t index, int64_t num_bytes) {
  const bool is_first = firstStagedSend() == index;
  StagingBuffer buffer = is_first ? pool_.acquire(StagingKind::kSend, num_bytes, *this) : StagingBuffer{};
  if (buffer) {
    return buffer;
  }
  buffer = pool_.acquire(StagingKind::kSendAhead, num_bytes, *this);
  if (!buffer) {
    held_up_sends_.insert(index);
  } else if (is_first) {
    pool_.withdraw(StagingKind::kSend, *this);
  }
  return buffer;
}

/// Whether a ready send must be packed, but others have been for long enough.
bool HostExecutor::givesWay(int32_t index) const {
  return packed_bytes_ >= kPackSliceBytes && sendSource(program_->sends[static_cast<size_t>(index)]) == nullptr;
}

void HostExecutor::putOff(int32_t index) {
  held_up_sends_.insert(index);
  if (!std::exchange(will_pack_, true)) {
    handleSoon({EventKind::kPack, 0});
  }
}

bool HostExecutor::postSend(int32_t index) {
  const SendStep& step = program_->sends[static_cast<size_t>(index)];
  const int64_t num_bytes = program_->numBytes(step);
  const std::byte* data = sendSource(step);
  if (data == nullptr) {
    if (givesWay(index)) {
      putOff(index);
      return false;
    }
    StagingBuffer& buffer = send_buffers_[static_cast<size_t>(index)];
    buffer = acquireSend(index, num_bytes);
    if (!buffer) {
      return false;
    }
    if (!takeOver(step, buffer)) {
      packRange(boxOf(step.place), step.begin, step.end, program_->places[static_cast<size_t>(step.place)].item_bytes, buffer.data);
      packed_bytes_ += num_bytes;
    }
    data = buffer.data;
  }
  transport_.send(operation_, group_rank_of_peer_[static_cast<size_t>(step.peer)], data, num_bytes, index);
  return true;
}

/// Where the same range has just come in, it is packed already: its buffer and the new one change places.
bool HostExecutor::takeOver(const SendStep& step, StagingBuffer& buffer) {
  if (unpacked_receive_ < 0) {
    return false;
  }
  const ReceiveStep& receive = program_->receives[static_cast<size_t>(unpacked_receive_)];
  StagingBuffer& received = receive_buffers_[static_cast<size_t>(unpacked_receive_)];
  if (receive.place != step.place || receive.begin != step.begin || receive.end != step.end || received.capacity != buffer.capacity) {
    return false;
  }
  std::swap(received.data, buffer.data);
  unpacked_receive_ = -1;
  return true;
}

/// Where a message's bytes lie in one run, or null.
const std::byte* HostExecutor::sendSource(const SendStep& step) const {
  return step.reduction >= 0 ? reduce_states_[static_cast<size_t>(step.reduction)].accumulator
                             : contiguousRun(boxOf(step.place), step.begin, step.end, program_->places[static_cast<size_t>(step.place)].item_bytes);
}

}  // namespace xmesh::runtime
