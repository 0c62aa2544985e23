#include "runtime/stream/stream_executor.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include "core/error.h"
#include "runtime/program/message_groups.h"

namespace xmesh::runtime {
namespace {

bool isOfSameBroadcast(const SendStep& a, const SendStep& b) {
  return a.circle == b.circle && a.box == b.box && a.begin == b.begin && a.end == b.end;
}

}  // namespace

StreamExecutor::StreamExecutor(std::shared_ptr<const Program> program, transport::StreamTransport& transport, std::vector<int32_t> group_rank_of_peer,
                               const std::vector<LocalTensor>& src, const std::vector<LocalTensor>& dst, const StreamKernels& kernels,
                               std::vector<transport::StreamTransport*> circles)
    : program_(std::move(program)),
      transport_(transport),
      group_rank_of_peer_(std::move(group_rank_of_peer)),
      circles_(std::move(circles)),
      kernels_(kernels) {
  core::require(program_->hasGroups(), "a stream needs a program whose messages are in groups");
  program_->checkLocalTensors(src, dst);
  core::require(
      group_rank_of_peer_.size() == program_->peer_ranks.size(),
      "expected the group ranks of " + std::to_string(program_->peer_ranks.size()) + " peers, got " + std::to_string(group_rank_of_peer_.size()));
  for (const SliceBox& box : program_->boxes) {
    const LocalTensor& tensor = (box.is_src ? src : dst)[static_cast<size_t>(box.tensor)];
    boxes_.push_back(stridedBox(tensor, box.offsets.data(), box.extents.data(), box.item_bytes));
  }
  orderItems();
  collectWays();
  collectGroups();
}

/// Sends and receives by group, in one in the plan's order; those of one broadcast are one item.
void StreamExecutor::orderItems() {
  size_t send = 0;
  size_t receive = 0;
  while (send < program_->sends.size() || receive < program_->receives.size()) {
    const bool is_send = receive == program_->receives.size() ||
                         (send < program_->sends.size() && program_->sends[send].position < program_->receives[receive].position);
    if (!is_send) {
      items_.push_back({false, static_cast<int32_t>(receive), program_->receives[receive].circle, program_->receives[receive].group, -1});
      ++receive;
      continue;
    }
    const SendStep& first = program_->sends[send];
    items_.push_back({true, static_cast<int32_t>(send), first.circle, first.group, -1});
    do {
      ++send;
    } while (first.circle >= 0 && send < program_->sends.size() && isOfSameBroadcast(first, program_->sends[send]));
  }
  std::stable_sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) { return a.group < b.group; });
}

void StreamExecutor::collectWays() {
  std::set<int32_t> send_to;
  std::set<int32_t> receive_from;
  for (const Item& item : items_) {
    if (item.circle < 0) {
      (item.is_send ? send_to : receive_from).insert(peerOf(item));
    }
  }
  send_to_.assign(send_to.begin(), send_to.end());
  receive_from_.assign(receive_from.begin(), receive_from.end());
}

int32_t StreamExecutor::peerOf(const Item& item) const {
  const auto index = static_cast<size_t>(item.index);
  return group_rank_of_peer_[static_cast<size_t>(item.is_send ? program_->sends[index].peer : program_->receives[index].peer)];
}

/// Staging memory: one accumulator (only one reduction is under way between groups, a partial sum until it is sent), then the messages of one group.
void StreamExecutor::collectGroups() {
  int64_t accumulator_bytes = 0;
  for (const ReduceStep& step : program_->reductions) {
    accumulator_bytes = std::max(accumulator_bytes, (step.end - step.begin) * step.reduction.accumulatorItemBytes());
  }
  const int64_t messages_offset = stagedBytes(accumulator_bytes);
  staging_bytes_ = messages_offset;
  for (size_t i = 0; i < items_.size(); ++i) {
    if (i == 0 || items_[i].group != items_[i - 1].group) {
      groups_.push_back({i, i, {}});
    }
    groups_.back().end = i + 1;
  }
  for (Group& group : groups_) {
    collectTransfers(group, messages_offset);
  }
}

/// Items that travel as one lie one behind the other in staging memory, on both ends alike.
void StreamExecutor::collectTransfers(Group& group, int64_t staging_offset) {
  std::vector<size_t> order(group.end - group.begin);
  std::iota(order.begin(), order.end(), group.begin);
  const auto keyOf = [this](size_t i) { return std::pair(items_[i].is_send, items_[i].circle < 0 ? peerOf(items_[i]) : -1); };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return keyOf(a) < keyOf(b); });
  for (size_t at = 0; at < order.size(); ++at) {
    Item& item = items_[order[at]];
    const auto [is_send, peer] = keyOf(order[at]);
    const bool goes_on = at > 0 && keyOf(order[at - 1]) == keyOf(order[at]);
    const bool is_one_of_some = goes_on || (at + 1 < order.size() && keyOf(order[at + 1]) == keyOf(order[at]));
    if (is_one_of_some || isStaged(item)) {
      item.staging_offset = staging_offset;
      staging_offset += stagedBytes(numBytes(item));
      (is_send ? group.has_packs : group.has_unpacks) = true;
    }
    if (goes_on) {
      Transfer& transfer = group.transfers.back();
      transfer.bytes = item.staging_offset - items_[transfer.first].staging_offset + numBytes(item);
    } else if (item.circle < 0) {
      group.transfers.push_back({is_send, peer, order[at], numBytes(item)});
    }
  }
  staging_bytes_ = std::max(staging_bytes_, staging_offset);
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
  transport_.connectWays(send_to_, receive_from_);
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (groups_[i].has_packs) {
      transport_.enqueue([this, i](void* stream) { packGroup(stream, groups_[i]); });
    }
    if (const Item& first = items_[groups_[i].begin]; first.circle >= 0) {
      enqueueBroadcast(first);
    } else {
      enqueueGroup(groups_[i]);
    }
    if (groups_[i].has_unpacks) {
      transport_.enqueue([this, i](void* stream) { unpackGroup(stream, groups_[i]); });
    }
  }
  if (!program_->copies.empty()) {
    transport_.enqueue([this](void* stream) { copyLocally(stream); });
  }
}

void StreamExecutor::enqueueGroup(const Group& group) {
  transport_.groupBegin();
  try {
    for (const Transfer& transfer : group.transfers) {
      const Item& first = items_[transfer.first];
      if (transfer.is_send) {
        transport_.enqueueSend(transfer.peer, sendSource(first), transfer.bytes);
      } else {
        transport_.enqueueRecv(transfer.peer, receiveTarget(first), transfer.bytes);
      }
    }
  } catch (const std::exception& error) {
    transport_.abort({error.what(), -1});
    transport_.groupEnd();
    throw;
  }
  transport_.groupEnd();
}

void StreamExecutor::enqueueBroadcast(const Item& item) {
  const std::vector<int64_t>& circle = program_->circles[static_cast<size_t>(item.circle)];
  const int64_t root =
      item.is_send ? program_->global_rank : program_->peer_ranks[static_cast<size_t>(program_->receives[static_cast<size_t>(item.index)].peer)];
  const auto root_index = static_cast<int32_t>(std::lower_bound(circle.begin(), circle.end(), root) - circle.begin());
  auto* data = item.is_send ? const_cast<std::byte*>(sendSource(item)) : receiveTarget(item);
  circles_.at(static_cast<size_t>(item.circle))->enqueueBroadcast(root_index, data, numBytes(item));
}

std::byte* StreamExecutor::receiveTarget(const Item& item) const {
  const ReceiveStep& step = program_->receives[static_cast<size_t>(item.index)];
  return item.staging_offset >= 0 ? staging_ + item.staging_offset : contiguousRun(boxOf(step.box), step.begin, step.end, itemBytes(step.box));
}

const std::byte* StreamExecutor::sendSource(const Item& item) const {
  const SendStep& step = program_->sends[static_cast<size_t>(item.index)];
  if (step.reduction >= 0) {
    return accumulatorOf(program_->reductions[static_cast<size_t>(step.reduction)]);
  }
  return item.staging_offset >= 0 ? staging_ + item.staging_offset : contiguousRun(boxOf(step.box), step.begin, step.end, itemBytes(step.box));
}

void StreamExecutor::packGroup(void* stream, const Group& group) const {
  std::vector<PackedRange> ranges;
  for (size_t i = group.begin; i < group.end; ++i) {
    if (items_[i].is_send && items_[i].staging_offset >= 0) {
      const SendStep& step = program_->sends[static_cast<size_t>(items_[i].index)];
      ranges.push_back({boxOf(step.box), step.begin, step.end, itemBytes(step.box), staging_ + items_[i].staging_offset});
    }
  }
  kernels_.pack(stream, ranges);
}

void StreamExecutor::unpackGroup(void* stream, const Group& group) const {
  std::vector<PackedRange> ranges;
  std::vector<ReductionPart> parts;
  for (size_t i = group.begin; i < group.end; ++i) {
    if (items_[i].is_send || items_[i].staging_offset < 0) {
      continue;
    }
    const ReceiveStep& step = program_->receives[static_cast<size_t>(items_[i].index)];
    std::byte* data = staging_ + items_[i].staging_offset;
    if (step.reduction >= 0) {
      takeContribution(parts, items_[i].index, data);
    } else {
      ranges.push_back({boxOf(step.box), step.begin, step.end, itemBytes(step.box), data});
    }
  }
  if (!ranges.empty()) {
    kernels_.unpack(stream, ranges);
  }
  if (!parts.empty()) {
    reduceParts(stream, parts);
  }
}

void StreamExecutor::copyLocally(void* stream) const {
  std::vector<BoxPair> pairs;
  for (const CopyStep& step : program_->copies) {
    pairs.push_back({boxOf(step.src_box), boxOf(step.dst_box), step.num_elements, itemBytes(step.src_box)});
  }
  kernels_.copy(stream, pairs);
}

/// Contributions come in order here: the program lists them so. Those of one reduction in one group make one part.
void StreamExecutor::takeContribution(std::vector<ReductionPart>& parts, int32_t receive, std::byte* data) const {
  const ReceiveStep& received = program_->receives[static_cast<size_t>(receive)];
  const ReduceStep& step = program_->reductions[static_cast<size_t>(received.reduction)];
  const int32_t turn = receive - step.first_receive;
  if (turn == 0 || parts.empty()) {
    ReductionPart& part = parts.emplace_back();
    part.reduction = step.reduction;
    part.num_elements = step.end - step.begin;
    part.accumulator = accumulatorOf(step);
    part.goes_on = turn > 0;
  }
  ReductionPart& part = parts.back();
  const auto take_own = [&] { part.contributions.push_back({boxOf(step.own_box), step.begin, false}); };
  if (step.own_after == turn) {
    take_own();
  }
  const int64_t item_bytes = received.is_sum ? step.reduction.accumulatorItemBytes() : step.reduction.itemBytes();
  part.contributions.push_back({denseBox(data, part.num_elements, item_bytes), 0, received.is_sum});
  if (turn + 1 < step.num_receives) {
    return;
  }
  if (step.own_after == step.num_receives) {
    take_own();
  }
  if (step.box >= 0) {
    part.ends = true;
    part.dst = boxOf(step.box);
    part.dst_begin = step.begin;
  }
}

/// At once, but where the first part needs what the accumulator holds and the last leaves something there.
void StreamExecutor::reduceParts(void* stream, const std::vector<ReductionPart>& parts) const {
  const std::span<const ReductionPart> all(parts);
  if (parts.size() == 1 || !parts.front().goes_on || parts.back().ends) {
    return kernels_.reduce(stream, all);
  }
  kernels_.reduce(stream, all.first(parts.size() - 1));
  kernels_.reduce(stream, all.last(1));
}

/// In the destination where it is one run of the accumulator's type, else at the start of staging memory.
std::byte* StreamExecutor::accumulatorOf(const ReduceStep& step) const {
  const bool may_be_in_place = step.box >= 0 && step.reduction.accumulatesInPlace();
  std::byte* run = may_be_in_place ? contiguousRun(boxOf(step.box), step.begin, step.end, step.reduction.itemBytes()) : nullptr;
  return run != nullptr ? run : staging_;
}

}  // namespace xmesh::runtime
