#include "runtime/stream/stream_executor.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.h"

namespace xmesh::runtime {
namespace {

int64_t aligned(int64_t num_bytes) { return (num_bytes + 63) / 64 * 64; }

}  // namespace

StreamExecutor::StreamExecutor(std::shared_ptr<const Program> program, transport::StreamTransport& transport, std::vector<int32_t> group_rank_of_peer,
                               const std::vector<LocalTensor>& src, const std::vector<LocalTensor>& dst, const StreamKernels& kernels,
                               Options options)
    : program_(std::move(program)), transport_(transport), group_rank_of_peer_(std::move(group_rank_of_peer)), kernels_(kernels) {
  program_->checkLocalTensors(src, dst);
  core::require(
      group_rank_of_peer_.size() == program_->peer_ranks.size(),
      "expected the group ranks of " + std::to_string(program_->peer_ranks.size()) + " peers, got " + std::to_string(group_rank_of_peer_.size()));
  for (const SliceBox& box : program_->boxes) {
    const LocalTensor& tensor = (box.is_src ? src : dst)[static_cast<size_t>(box.tensor)];
    boxes_.push_back(stridedBox(tensor, box.offsets.data(), box.extents.data(), box.item_bytes));
  }
  orderItems();
  cutGroups(options.staging_bytes);
}

/// Sends and receives in the plan's order.
void StreamExecutor::orderItems() {
  size_t send = 0;
  size_t receive = 0;
  while (send < program_->sends.size() || receive < program_->receives.size()) {
    const bool is_send = receive == program_->receives.size() ||
                         (send < program_->sends.size() && program_->sends[send].position < program_->receives[receive].position);
    items_.push_back({is_send, static_cast<int32_t>(is_send ? send++ : receive++), -1});
  }
}

/// Staging memory: one accumulator, one dense own contribution (only one reduction is under way at a time, a partial sum until it is sent), then
/// the messages of one group.
void StreamExecutor::cutGroups(int64_t bound_bytes) {
  int64_t accumulator_bytes = 0;
  int64_t own_bytes = 0;
  for (const ReduceStep& step : program_->reductions) {
    accumulator_bytes = std::max(accumulator_bytes, (step.end - step.begin) * step.reduction.accumulatorItemBytes());
    if (step.own_box >= 0 && contiguousRun(boxOf(step.own_box), step.begin, step.end, step.reduction.itemBytes()) == nullptr) {
      own_bytes = std::max(own_bytes, (step.end - step.begin) * step.reduction.itemBytes());
    }
  }
  own_offset_ = aligned(accumulator_bytes);
  const int64_t messages_offset = own_offset_ + aligned(own_bytes);
  staging_bytes_ = messages_offset;
  std::vector<size_t> ready_group(program_->sends.size(), 0);  // the first group that may hold a send
  int64_t used = messages_offset;
  Group group;
  const auto flush = [&](size_t next) {
    groups_.push_back(group);
    group = {next, next, false, false};
    used = messages_offset;
  };
  for (size_t i = 0; i < items_.size(); ++i) {
    Item& item = items_[i];
    const int64_t need = isStaged(item) ? aligned(numBytes(item)) : 0;
    const bool is_full = need > 0 && used > messages_offset && used + need > bound_bytes;
    const bool is_early = item.is_send && ready_group[static_cast<size_t>(item.index)] > groups_.size();
    if (is_full || is_early) {
      flush(i);
    }
    if (need > 0) {
      item.staging_offset = used;
      used += need;
      staging_bytes_ = std::max(staging_bytes_, used);
      (item.is_send ? group.has_packs : group.has_unpacks) = true;
    }
    group.end = i + 1;
    if (item.is_send) {
      continue;
    }
    const ReceiveStep& step = program_->receives[static_cast<size_t>(item.index)];
    const int32_t arrival = step.reduction < 0 ? step.arrival : program_->reductions[static_cast<size_t>(step.reduction)].arrival;
    for (int32_t d = program_->dependents_begin[static_cast<size_t>(arrival)]; d < program_->dependents_begin[static_cast<size_t>(arrival) + 1];
         ++d) {
      ready_group[static_cast<size_t>(program_->dependents[static_cast<size_t>(d)])] = groups_.size() + 1;
    }
  }
  if (group.begin < group.end) {
    flush(items_.size());
  }
}

bool StreamExecutor::isStaged(const Item& item) const {
  if (item.is_send) {
    const SendStep& step = program_->sends[static_cast<size_t>(item.index)];
    return step.reduction < 0 && contiguousRun(boxOf(step.box), step.begin, step.end, itemBytes(step.box)) == nullptr;
  }
  const ReceiveStep& step = program_->receives[static_cast<size_t>(item.index)];
  return step.reduction >= 0 || contiguousRun(boxOf(step.box), step.begin, step.end, itemBytes(step.box)) == nullptr;
}

int64_t StreamExecutor::numBytes(const Item& item) const {
  return item.is_send ? program_->numBytes(program_->sends[static_cast<size_t>(item.index)])
                      : program_->numBytes(program_->receives[static_cast<size_t>(item.index)]);
}

void StreamExecutor::enqueue(void* staging) {
  staging_ = static_cast<std::byte*>(staging);
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (groups_[i].has_packs) {
      transport_.enqueue([this, i](void* stream) { packGroup(stream, groups_[i]); });
    }
    transport_.groupBegin();
    enqueueMessages(groups_[i]);
    transport_.groupEnd();
    if (groups_[i].has_unpacks) {
      transport_.enqueue([this, i](void* stream) { unpackGroup(stream, groups_[i]); });
    }
  }
  if (!program_->copies.empty()) {
    transport_.enqueue([this](void* stream) {
      for (const CopyStep& step : program_->copies) {
        kernels_.copy(stream, boxOf(step.src_box), boxOf(step.dst_box), step.num_elements, itemBytes(step.src_box));
      }
    });
  }
}

void StreamExecutor::enqueueMessages(const Group& group) {
  for (size_t i = group.begin; i < group.end; ++i) {
    const Item& item = items_[i];
    if (item.is_send) {
      const SendStep& step = program_->sends[static_cast<size_t>(item.index)];
      transport_.enqueueSend(group_rank_of_peer_[static_cast<size_t>(step.peer)], sendSource(item), numBytes(item));
    } else {
      const ReceiveStep& step = program_->receives[static_cast<size_t>(item.index)];
      std::byte* data =
          item.staging_offset >= 0 ? staging_ + item.staging_offset : contiguousRun(boxOf(step.box), step.begin, step.end, itemBytes(step.box));
      transport_.enqueueRecv(group_rank_of_peer_[static_cast<size_t>(step.peer)], data, numBytes(item));
    }
  }
}

const std::byte* StreamExecutor::sendSource(const Item& item) const {
  const SendStep& step = program_->sends[static_cast<size_t>(item.index)];
  if (step.reduction >= 0) {
    return accumulatorOf(program_->reductions[static_cast<size_t>(step.reduction)]);
  }
  return item.staging_offset >= 0 ? staging_ + item.staging_offset : contiguousRun(boxOf(step.box), step.begin, step.end, itemBytes(step.box));
}

void StreamExecutor::packGroup(void* stream, const Group& group) const {
  for (size_t i = group.begin; i < group.end; ++i) {
    if (items_[i].is_send && items_[i].staging_offset >= 0) {
      const SendStep& step = program_->sends[static_cast<size_t>(items_[i].index)];
      kernels_.pack(stream, boxOf(step.box), step.begin, step.end, itemBytes(step.box), staging_ + items_[i].staging_offset);
    }
  }
}

void StreamExecutor::unpackGroup(void* stream, const Group& group) const {
  for (size_t i = group.begin; i < group.end; ++i) {
    if (items_[i].is_send || items_[i].staging_offset < 0) {
      continue;
    }
    const ReceiveStep& step = program_->receives[static_cast<size_t>(items_[i].index)];
    const std::byte* data = staging_ + items_[i].staging_offset;
    if (step.reduction >= 0) {
      takeContribution(stream, items_[i].index, data);
    } else {
      kernels_.unpack(stream, data, boxOf(step.box), step.begin, step.end, itemBytes(step.box));
    }
  }
}

/// Contributions come in order here: the program lists them so, and the stream keeps it.
void StreamExecutor::takeContribution(void* stream, int32_t receive, const std::byte* contribution) const {
  const ReduceStep& step = program_->reductions[static_cast<size_t>(program_->receives[static_cast<size_t>(receive)].reduction)];
  const Reduction reduction = program_->receives[static_cast<size_t>(receive)].is_sum ? step.reduction.ofSums() : step.reduction;
  const int64_t num_elements = step.end - step.begin;
  const int32_t turn = receive - step.first_receive;
  std::byte* accumulator = accumulatorOf(step);
  if (step.own_after == turn) {
    takeOwn(stream, step, accumulator);
  }
  if (turn == 0 && step.own_after != 0) {
    kernels_.initAccumulator(stream, reduction, accumulator, contribution, num_elements);
  } else {
    kernels_.accumulate(stream, reduction, accumulator, contribution, num_elements);
  }
  if (turn + 1 < step.num_receives) {
    return;
  }
  if (step.own_after == step.num_receives) {
    takeOwn(stream, step, accumulator);
  }
  if (step.box < 0) {
    return;
  }
  kernels_.finishAccumulator(stream, step.reduction, accumulator, num_elements);
  if (accumulator == staging_) {
    kernels_.unpack(stream, accumulator, boxOf(step.box), step.begin, step.end, step.reduction.itemBytes());
  }
}

void StreamExecutor::takeOwn(void* stream, const ReduceStep& step, std::byte* accumulator) const {
  const int64_t num_elements = step.end - step.begin;
  const StridedBox& box = boxOf(step.own_box);
  const std::byte* own = contiguousRun(box, step.begin, step.end, step.reduction.itemBytes());
  if (own == nullptr) {
    kernels_.pack(stream, box, step.begin, step.end, step.reduction.itemBytes(), staging_ + own_offset_);
    own = staging_ + own_offset_;
  }
  if (step.own_after == 0) {
    kernels_.initAccumulator(stream, step.reduction, accumulator, own, num_elements);
  } else {
    kernels_.accumulate(stream, step.reduction, accumulator, own, num_elements);
  }
}

/// In the destination where it is one run of the accumulator's type, else at the start of staging memory.
std::byte* StreamExecutor::accumulatorOf(const ReduceStep& step) const {
  const bool may_be_in_place = step.box >= 0 && step.reduction.accumulatesInPlace();
  std::byte* run = may_be_in_place ? contiguousRun(boxOf(step.box), step.begin, step.end, step.reduction.itemBytes()) : nullptr;
  return run != nullptr ? run : staging_;
}

}  // namespace xmesh::runtime
