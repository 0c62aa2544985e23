#include "runtime/host/host_reductions.h"

#include <algorithm>
#include <array>

namespace xmesh::runtime {
namespace {

bool isAligned(const std::byte* data, int64_t item_bytes) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(std::min<int64_t>(item_bytes, alignof(std::max_align_t))) == 0;
}

}  // namespace

HostReductions::HostReductions(const Program& program, const std::vector<StridedBox>& boxes, StagingUse& staging)
    : program_(program),
      boxes_(boxes),
      staging_(staging),
      states_(program.reductions.size()),
      has_arrived_(program.reductions.empty() ? 0 : program.receives.size()) {}

bool HostReductions::prepare(int32_t reduction) {
  const ReduceStep& step = program_.reductions[static_cast<size_t>(reduction)];
  State& state = states_[static_cast<size_t>(reduction)];
  if (state.accumulator != nullptr) {
    return true;
  }
  const int64_t item_bytes = step.reduction.itemBytes();
  const bool may_be_in_place = step.box >= 0 && step.reduction.accumulatesInPlace();
  std::byte* in_place = may_be_in_place ? contiguousRun(boxOf(step.box), step.begin, step.end, item_bytes) : nullptr;
  if (in_place != nullptr && isAligned(in_place, item_bytes)) {
    state.accumulator = in_place;
  } else {
    state.staged = staging_.acquire(StagingKind::kAccumulate, (step.end - step.begin) * step.reduction.accumulatorItemBytes());
    if (!state.staged) {
      return false;
    }
    state.accumulator = state.staged.data;
  }
  if (step.own_after == 0) {
    takeOwn(step, state);
  }
  return true;
}

bool HostReductions::take(int32_t receive, std::vector<StagingBuffer>& staged) {
  has_arrived_[static_cast<size_t>(receive)] = 1;
  const int32_t reduction = program_.receives[static_cast<size_t>(receive)].reduction;
  const ReduceStep& step = program_.reductions[static_cast<size_t>(reduction)];
  State& state = states_[static_cast<size_t>(reduction)];
  while (true) {
    if (step.own_after == state.num_received && !state.is_own_done) {
      takeOwn(step, state);
    }
    const auto next = static_cast<size_t>(step.first_receive + state.num_received);
    if (state.num_received == step.num_receives || has_arrived_[next] == 0) {
      break;
    }
    if (!staged.empty() && staged[next]) {
      const bool is_first = state.num_received == 0 && !state.is_own_done;
      const Reduction kind = program_.receives[next].is_sum ? step.reduction.ofSums() : step.reduction;
      (is_first ? initAccumulator : accumulate)(kind, state.accumulator, staged[next].data, step.end - step.begin);
      staging_.release(staged[next]);
    }
    ++state.num_received;
  }
  if (state.num_received < step.num_receives) {
    return false;
  }
  finish(step, state);
  return true;
}

/// This rank's own contribution, by way of a small buffer where it is not dense.
void HostReductions::takeOwn(const ReduceStep& step, State& state) const {
  constexpr int64_t kBufferBytes = 4096;
  alignas(16) std::array<std::byte, kBufferBytes> dense;
  state.is_own_done = true;
  const StridedBox& box = boxOf(step.own_box);
  const int64_t item_bytes = step.reduction.itemBytes();
  const auto add = step.own_after == 0 ? initAccumulator : accumulate;
  const std::byte* run = contiguousRun(box, step.begin, step.end, item_bytes);
  if (run != nullptr) {
    return add(step.reduction, state.accumulator, run, step.end - step.begin);
  }
  const int64_t piece = kBufferBytes / item_bytes;
  for (int64_t begin = step.begin; begin < step.end; begin += piece) {
    const int64_t end = std::min(step.end, begin + piece);
    packRange(box, begin, end, item_bytes, dense.data());
    add(step.reduction, state.accumulator + (begin - step.begin) * step.reduction.accumulatorItemBytes(), dense.data(), end - begin);
  }
}

void HostReductions::finish(const ReduceStep& step, State& state) {
  if (step.box < 0) {
    return;  // it is sent from the accumulator
  }
  finishAccumulator(step.reduction, state.accumulator, step.end - step.begin);
  if (state.staged) {
    unpackRange(state.accumulator, boxOf(step.box), step.begin, step.end, step.reduction.itemBytes());
    staging_.release(state.staged);
  }
}

void HostReductions::releaseAll() {
  for (State& state : states_) {
    staging_.release(state.staged);
  }
}

}  // namespace xmesh::runtime
