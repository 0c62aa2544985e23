// How the executor posts its receives in plan order and what it does with an arrival: to where it belongs, and on to the next hop.
#include <cstddef>
#include <utility>

#include "runtime/host/host_executor.h"

namespace xmesh::runtime {

void HostExecutor::postReceives() {
  while (may_write_ && next_receive_ < static_cast<int32_t>(program_->receives.size()) && postReceive(next_receive_)) {
    ++next_receive_;
  }
}

bool HostExecutor::postReceive(int32_t index) {
  const ReceiveStep& step = program_->receives[static_cast<size_t>(index)];
  if (step.reduction >= 0 && !reductions_.prepare(step.reduction)) {
    return false;
  }
  const int64_t num_bytes = program_->numBytes(step);
  std::byte* target = receiveTarget(index);
  if (target == nullptr) {
    if (receive_buffers_.empty()) {
      receive_buffers_.resize(program_->receives.size());
    }
    StagingBuffer& buffer = receive_buffers_[static_cast<size_t>(index)];
    buffer = staging_.acquire(StagingKind::kReceive, num_bytes);
    if (!buffer) {
      return false;
    }
    target = buffer.data;
  }
  transport_.recv(operationOf(step.track), group_rank_of_peer_[static_cast<size_t>(step.peer)], target, num_bytes, index);
  return true;
}

/// Where a message may go without staging: a value to where it belongs, what comes first into a reduction into the accumulator if it has its type.
std::byte* HostExecutor::receiveTarget(int32_t index) {
  const ReceiveStep& step = program_->receives[static_cast<size_t>(index)];
  if (step.reduction < 0) {
    return contiguousRun(boxOf(step.box), step.begin, step.end, program_->boxes[static_cast<size_t>(step.box)].item_bytes);
  }
  const ReduceStep& reduce = program_->reductions[static_cast<size_t>(step.reduction)];
  const bool is_first = index == reduce.first_receive && reduce.own_after != 0;
  return is_first && (step.is_sum || reduce.reduction.accumulatesInPlace()) ? reductions_.accumulator(step.reduction) : nullptr;
}

void HostExecutor::takeReceived(int32_t index) {
  const ReceiveStep& step = program_->receives[static_cast<size_t>(index)];
  ++num_received_[static_cast<size_t>(step.peer)];
  if (step.reduction >= 0) {
    --num_open_;
    if (reductions_.take(index, receive_buffers_)) {
      onArrival(program_->reductions[static_cast<size_t>(step.reduction)].arrival);
    }
  } else if (!receive_buffers_.empty() && receive_buffers_[static_cast<size_t>(index)]) {
    passOn(index);
  } else {
    --num_open_;
    onArrival(step.arrival);
  }
  postReceives();
}

/// What came in packed goes on to the next hop first and to where it belongs afterwards.
void HostExecutor::passOn(int32_t index) {
  const ReceiveStep& step = program_->receives[static_cast<size_t>(index)];
  const PackedArrivals::key_type key(step.box, step.begin);
  packed_arrivals_[key] = {.receive = index, .data = receive_buffers_[static_cast<size_t>(index)].data};
  onArrival(step.arrival);
  const auto arrival = packed_arrivals_.find(key);
  if (arrival != packed_arrivals_.end() && arrival->second.send < 0) {
    unpack(arrival);
  } else {
    unpackSoon();
  }
}

/// Unpacks an arrival; returns its bytes.
int64_t HostExecutor::unpack(PackedArrivals::iterator arrival) {
  const PackedArrival packed = arrival->second;
  packed_arrivals_.erase(arrival);
  const ReceiveStep& step = program_->receives[static_cast<size_t>(packed.receive)];
  unpackRange(packed.data, boxOf(step.box), step.begin, step.end, program_->boxes[static_cast<size_t>(step.box)].item_bytes);
  --num_open_;
  if (packed.send < 0) {
    staging_.release(receive_buffers_[static_cast<size_t>(packed.receive)]);
  }
  return program_->numBytes(step);
}

/// Unpacks in a task of its own: the transport sends meanwhile what was passed on.
void HostExecutor::unpackSoon() {
  if (!packed_arrivals_.empty() && !std::exchange(will_unpack_, true)) {
    handleSoon({EventKind::kUnpack, 0});
  }
}

void HostExecutor::unpackSlice() {
  will_unpack_ = false;
  for (int64_t left_bytes = kSliceBytes; left_bytes > 0 && !packed_arrivals_.empty();) {
    left_bytes -= unpack(packed_arrivals_.begin());
  }
  unpackSoon();
}

/// A send's buffer may hold the only copy of what was passed on.
void HostExecutor::unpackBeforeRelease(int32_t send) {
  const SendStep& step = program_->sends[static_cast<size_t>(send)];
  const auto arrival = packed_arrivals_.find({step.box, step.begin});
  if (arrival != packed_arrivals_.end() && arrival->second.send == send) {
    unpack(arrival);
  }
}

void HostExecutor::onArrival(int32_t arrival) {
  const Program& todo = *program_;
  for (int32_t i = todo.dependents_begin[static_cast<size_t>(arrival)]; i < todo.dependents_begin[static_cast<size_t>(arrival) + 1]; ++i) {
    const int32_t send = todo.dependents[static_cast<size_t>(i)];
    if (--num_deps_[static_cast<size_t>(send)] > 0 || nextSendLike(send) != send) {
      continue;
    }
    const int32_t first_staged = firstStagedSend();
    postSendsLike(send);
    if (firstStagedSend() != first_staged) {
      postStagedSends();
    }
  }
}

}  // namespace xmesh::runtime
