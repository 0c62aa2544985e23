// How the executor posts its receives in plan order and what it does with an arrival: to its place, and on to the next hop.
#include <cstddef>
#include <utility>

#include "runtime/host_executor.h"

namespace xmesh::runtime {

void HostExecutor::postReceives() {
  while (next_receive_ < static_cast<int32_t>(program_->receives.size()) && postReceive(next_receive_)) {
    ++next_receive_;
  }
}

bool HostExecutor::postReceive(int32_t index) {
  const ReceiveStep& step = program_->receives[static_cast<size_t>(index)];
  if (step.reduction >= 0 && !prepareReduction(step.reduction)) {
    return false;
  }
  const int64_t num_bytes = program_->numBytes(step);
  std::byte* target = receiveTarget(index);
  if (target == nullptr) {
    if (receive_buffers_.empty()) {
      receive_buffers_.resize(program_->receives.size());
    }
    StagingBuffer& buffer = receive_buffers_[static_cast<size_t>(index)];
    buffer = pool_.acquire(StagingKind::kReceive, num_bytes, *this);
    if (!buffer) {
      return false;
    }
    target = buffer.data;
  }
  transport_.recv(operationOf(step.channel), group_rank_of_peer_[static_cast<size_t>(step.peer)], target, num_bytes, index);
  return true;
}

/// Where a message may go without staging: a value into its place, what comes first into a reduction into the accumulator if it has its type.
std::byte* HostExecutor::receiveTarget(int32_t index) {
  const ReceiveStep& step = program_->receives[static_cast<size_t>(index)];
  if (step.reduction < 0) {
    return contiguousRun(boxOf(step.place), step.begin, step.end, program_->places[static_cast<size_t>(step.place)].item_bytes);
  }
  const ReduceStep& reduce = program_->reductions[static_cast<size_t>(step.reduction)];
  const bool is_first = index == reduce.first_receive && reduce.own_turn != 0;
  return is_first && (step.is_sum || reduce.reduction.accumulatesInPlace()) ? reduce_states_[static_cast<size_t>(step.reduction)].accumulator
                                                                            : nullptr;
}

void HostExecutor::takeReceived(int32_t index) {
  const ReceiveStep& step = program_->receives[static_cast<size_t>(index)];
  ++num_received_[static_cast<size_t>(step.peer)];
  if (step.reduction >= 0) {
    --num_open_;
    has_arrived_[static_cast<size_t>(index)] = 1;
    advanceReduction(step.reduction);
  } else if (!receive_buffers_.empty() && receive_buffers_[static_cast<size_t>(index)]) {
    passOn(index);
  } else {
    --num_open_;
    onArrival(step.arrival);
  }
  postReceives();
}

/// What came in packed goes on to the next hop first and to its place afterwards.
void HostExecutor::passOn(int32_t index) {
  packed_arrivals_.push_back({.receive = index, .data = receive_buffers_[static_cast<size_t>(index)].data});
  onArrival(program_->receives[static_cast<size_t>(index)].arrival);
  for (size_t i = 0; i < packed_arrivals_.size(); ++i) {
    if (packed_arrivals_[i].receive == index && packed_arrivals_[i].send < 0) {
      return unpack(i);
    }
  }
  unpackSoon();
}

/// Brings a packed arrival to its place.
void HostExecutor::unpack(size_t i) {
  const PackedArrival arrival = packed_arrivals_[i];
  packed_arrivals_.erase(packed_arrivals_.begin() + static_cast<std::ptrdiff_t>(i));
  const ReceiveStep& step = program_->receives[static_cast<size_t>(arrival.receive)];
  unpackRange(arrival.data, boxOf(step.place), step.begin, step.end, program_->places[static_cast<size_t>(step.place)].item_bytes);
  --num_open_;
  if (arrival.send < 0) {
    release(receive_buffers_[static_cast<size_t>(arrival.receive)]);
  }
}

/// Unpacks one arrival in a task of its own: the transport sends meanwhile what was passed on.
void HostExecutor::unpackSoon() {
  if (!packed_arrivals_.empty() && !std::exchange(will_unpack_, true)) {
    handleSoon({EventKind::kUnpack, 0});
  }
}

void HostExecutor::unpackNext() {
  will_unpack_ = false;
  if (!packed_arrivals_.empty()) {
    unpack(0);
  }
  unpackSoon();
}

/// A send's buffer may hold the only copy of what was passed on.
void HostExecutor::unpackBeforeRelease(int32_t send) {
  for (size_t i = 0; i < packed_arrivals_.size(); ++i) {
    if (packed_arrivals_[i].send == send) {
      return unpack(i);
    }
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
