#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "runtime/host/host_executor.h"

namespace xmesh::runtime {
namespace {

bool isAligned(const std::byte* data, int64_t item_bytes) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(std::min<int64_t>(item_bytes, alignof(std::max_align_t))) == 0;
}

}  // namespace

/// Makes sure that the reduction has an accumulator; that of a partial sum is staged until it has been sent.
bool HostExecutor::prepareReduction(int32_t index) {
  const ReduceStep& step = program_->reductions[static_cast<size_t>(index)];
  ReduceState& state = reduce_states_[static_cast<size_t>(index)];
  if (state.accumulator != nullptr) {
    return true;
  }
  const int64_t item_bytes = step.reduction.itemBytes();
  const bool may_be_in_place = step.box >= 0 && step.reduction.accumulatesInPlace();
  std::byte* in_place = may_be_in_place ? contiguousRun(boxOf(step.box), step.begin, step.end, item_bytes) : nullptr;
  if (in_place != nullptr && isAligned(in_place, item_bytes)) {
    state.accumulator = in_place;
  } else {
    state.staged = pool_.acquire(StagingKind::kAccumulate, (step.end - step.begin) * step.reduction.accumulatorItemBytes(), *this);
    if (!state.staged) {
      return false;
    }
    state.accumulator = state.staged.data;
  }
  if (step.own_after == 0) {
    accumulateOwn(step, state);
    state.is_own_done = true;
  }
  return true;
}

/// Takes in what has arrived, as far as it is its turn.
void HostExecutor::advanceReduction(int32_t index) {
  const ReduceStep& step = program_->reductions[static_cast<size_t>(index)];
  ReduceState& state = reduce_states_[static_cast<size_t>(index)];
  while (true) {
    if (step.own_after == state.num_received && !state.is_own_done) {
      accumulateOwn(step, state);
      state.is_own_done = true;
    }
    const auto next = static_cast<size_t>(step.first_receive + state.num_received);
    if (state.num_received == step.num_receives || has_arrived_[next] == 0) {
      break;
    }
    if (!receive_buffers_.empty() && receive_buffers_[next]) {
      StagingBuffer& buffer = receive_buffers_[next];
      const bool is_first = state.num_received == 0 && !state.is_own_done;
      const Reduction reduction = program_->receives[next].is_sum ? step.reduction.ofSums() : step.reduction;
      (is_first ? initAccumulator : accumulate)(reduction, state.accumulator, buffer.data, step.end - step.begin);
      release(buffer);
    }
    ++state.num_received;
  }
  if (state.num_received == step.num_receives) {
    finishReduction(step, state);
  }
}

/// Own contribution, by way of a small buffer where it is not dense.
void HostExecutor::accumulateOwn(const ReduceStep& step, const ReduceState& state) const {
  constexpr int64_t kBufferBytes = 4096;
  alignas(16) std::array<std::byte, kBufferBytes> dense;
  const StridedBox& box = boxOf(step.own_box);
  const int64_t item_bytes = step.reduction.itemBytes();
  const auto take = step.own_after == 0 ? initAccumulator : accumulate;
  const std::byte* run = contiguousRun(box, step.begin, step.end, item_bytes);
  if (run != nullptr) {
    return take(step.reduction, state.accumulator, run, step.end - step.begin);
  }
  const int64_t piece = kBufferBytes / item_bytes;
  for (int64_t begin = step.begin; begin < step.end; begin += piece) {
    const int64_t end = std::min(step.end, begin + piece);
    packRange(box, begin, end, item_bytes, dense.data());
    take(step.reduction, state.accumulator + (begin - step.begin) * step.reduction.accumulatorItemBytes(), dense.data(), end - begin);
  }
}

void HostExecutor::finishReduction(const ReduceStep& step, ReduceState& state) {
  if (step.box < 0) {
    return onArrival(step.arrival);
  }
  finishAccumulator(step.reduction, state.accumulator, step.end - step.begin);
  if (state.staged) {
    unpackRange(state.accumulator, boxOf(step.box), step.begin, step.end, step.reduction.itemBytes());
    release(state.staged);
  }
  onArrival(step.arrival);
}

}  // namespace xmesh::runtime
