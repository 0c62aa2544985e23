#include "runtime/host_executor.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace xmesh::runtime {
namespace {

/// Local copies give way to other work on the transport's thread after so many bytes.
constexpr int64_t kCopySliceBytes = int64_t{1} << 20;

}  // namespace

HostExecutor::HostExecutor(std::shared_ptr<const Program> program, transport::HostTransport& transport, transport::OperationId operation,
                           std::vector<int32_t> group_rank_of_peer, std::vector<LocalTensor> src, std::vector<LocalTensor> dst, StagingPool& pool,
                           std::function<void()> on_done)
    : program_(std::move(program)),
      transport_(transport),
      operation_(operation),
      group_rank_of_peer_(std::move(group_rank_of_peer)),
      pool_(pool),
      on_done_(std::move(on_done)) {
  const Program& todo = *program_;
  todo.checkLocalTensors(src, dst);
  if (group_rank_of_peer_.size() != todo.peer_ranks.size()) {
    throw core::InvalidArgument("expected the group ranks of " + std::to_string(todo.peer_ranks.size()) + " peers, got " +
                                std::to_string(group_rank_of_peer_.size()));
  }
  boxes_.reserve(todo.places.size());
  for (const Place& place : todo.places) {
    const LocalTensor& tensor = (place.is_src ? src : dst)[static_cast<size_t>(place.tensor)];
    boxes_.push_back(stridedBox(tensor, place.offsets.data(), place.extents.data(), place.item_bytes));
  }
  num_deps_.reserve(todo.sends.size());
  for (size_t i = 0; i < todo.sends.size(); ++i) {
    const SendStep& step = todo.sends[i];
    num_deps_.push_back(step.num_deps);
    if (step.reduction < 0 &&
        contiguousRun(boxOf(step.place), step.begin, step.end, todo.places[static_cast<size_t>(step.place)].item_bytes) == nullptr) {
      staged_sends_.push_back(static_cast<int32_t>(i));
    }
  }
  next_send_ = todo.first_send_of_peer;
  num_sent_.assign(todo.peer_ranks.size(), 0);
  num_received_.assign(todo.peer_ranks.size(), 0);
  send_buffers_.resize(staged_sends_.empty() ? 0 : todo.sends.size());
  reduce_states_.resize(todo.reductions.size());
  has_arrived_.resize(todo.reductions.empty() ? 0 : todo.receives.size());
  num_open_ = todo.numSends() + todo.numReceives() + static_cast<int64_t>(todo.copies.size());
}

HostExecutor::~HostExecutor() {
  if (phase_ == Phase::kRunning) {
    cancel();
  }
}

void HostExecutor::start() {
  core::require(phase_ == Phase::kNew, "an operation can be started only once");
  phase_ = Phase::kRunning;
  handle({EventKind::kStart, 0});
}

void HostExecutor::cancel() {
  if (phase_ != Phase::kRunning) {
    return;
  }
  transport_.close(operation_);
  transportGone();
  pool_.serve();
}

void HostExecutor::transportGone() {
  if (phase_ != Phase::kRunning) {
    return;
  }
  phase_ = Phase::kCancelled;
  if (self_ != nullptr) {
    *self_ = nullptr;
  }
  releaseAll();
  pool_.forget(*this);
}

void HostExecutor::onSent(int64_t cookie) { handle({EventKind::kSent, static_cast<int32_t>(cookie)}); }

void HostExecutor::onReceived(int64_t cookie) { handle({EventKind::kReceived, static_cast<int32_t>(cookie)}); }

void HostExecutor::handle(Event event) {
  if (is_handling_) {
    pending_.push_back(event);
    return;
  }
  is_handling_ = true;
  process(event);
  for (size_t i = 0; i < pending_.size(); ++i) {
    process(pending_[i]);
  }
  pending_.clear();
  is_handling_ = false;
  settle();
}

void HostExecutor::process(Event event) {
  if (phase_ != Phase::kRunning) {
    return;
  }
  switch (event.kind) {
    case EventKind::kStart:
      return begin();
    case EventKind::kSent:
      return takeSent(event.index);
    case EventKind::kReceived:
      return takeReceived(event.index);
    case EventKind::kStagingFree:
      postReceives();
      postStagedSends();
      return postHeldUpSends();
    case EventKind::kCopy:
      return copySlice();
  }
}

void HostExecutor::takeSent(int32_t index) {
  const SendStep& step = program_->sends[static_cast<size_t>(index)];
  --num_open_;
  ++num_sent_[static_cast<size_t>(step.peer)];
  if (step.reduction >= 0) {
    release(reduce_states_[static_cast<size_t>(step.reduction)].staged);
    postReceives();
  } else if (!send_buffers_.empty() && send_buffers_[static_cast<size_t>(index)]) {
    release(send_buffers_[static_cast<size_t>(index)]);
    postStagedSends();
    postHeldUpSends();
  }
}

/// Ends an event: reports the end of the operation, or lets others have what was released. Nothing of this object is touched afterwards.
void HostExecutor::settle() {
  if (phase_ == Phase::kRunning && num_open_ == 0) {
    phase_ = Phase::kDone;
    transport_.close(operation_);
    pool_.forget(*this);
    pool_.serve();
    const std::function<void()> on_done = std::move(on_done_);
    if (on_done) {
      on_done();
    }
    return;
  }
  if (has_released_) {
    has_released_ = false;
    pool_.serve();
  }
}

void HostExecutor::begin() {
  transport_.open(operation_, *this);
  postReceives();
  // In plan order over all peers, as far as nothing has to be waited for.
  for (size_t i = 0; i < program_->sends.size(); ++i) {
    const auto peer = static_cast<size_t>(program_->sends[i].peer);
    if (next_send_[peer] == static_cast<int32_t>(i) && num_deps_[i] == 0 && postSend(static_cast<int32_t>(i))) {
      next_send_[peer] = program_->sends[i].next_of_peer;
    }
  }
  if (!program_->copies.empty()) {
    copySlice();
  }
}

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
  transport_.recv(operation_, group_rank_of_peer_[static_cast<size_t>(step.peer)], target, num_bytes, index);
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

/// Goes on, in plan order, where ready sends found no memory.
void HostExecutor::postHeldUpSends() {
  while (!held_up_sends_.empty()) {
    const int32_t index = *held_up_sends_.begin();
    held_up_sends_.erase(held_up_sends_.begin());
    int32_t& next = next_send_[static_cast<size_t>(program_->sends[static_cast<size_t>(index)].peer)];
    if (next != index) {
      continue;
    }
    if (!postSend(index)) {
      return;
    }
    next = program_->sends[static_cast<size_t>(index)].next_of_peer;
    if (next >= 0 && num_deps_[static_cast<size_t>(next)] == 0) {
      held_up_sends_.insert(next);
    }
  }
  pool_.withdraw(StagingKind::kSendAhead, *this);
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

bool HostExecutor::postSend(int32_t index) {
  const SendStep& step = program_->sends[static_cast<size_t>(index)];
  const int64_t num_bytes = program_->numBytes(step);
  const std::byte* data = sendSource(step);
  if (data == nullptr) {
    StagingBuffer& buffer = send_buffers_[static_cast<size_t>(index)];
    buffer = acquireSend(index, num_bytes);
    if (!buffer) {
      return false;
    }
    packRange(boxOf(step.place), step.begin, step.end, program_->places[static_cast<size_t>(step.place)].item_bytes, buffer.data);
    data = buffer.data;
  }
  transport_.send(operation_, group_rank_of_peer_[static_cast<size_t>(step.peer)], data, num_bytes, index);
  return true;
}

/// Where a message's bytes lie in one run, or null.
const std::byte* HostExecutor::sendSource(const SendStep& step) const {
  return step.reduction >= 0 ? reduce_states_[static_cast<size_t>(step.reduction)].accumulator
                             : contiguousRun(boxOf(step.place), step.begin, step.end, program_->places[static_cast<size_t>(step.place)].item_bytes);
}

void HostExecutor::takeReceived(int32_t index) {
  const ReceiveStep& step = program_->receives[static_cast<size_t>(index)];
  --num_open_;
  ++num_received_[static_cast<size_t>(step.peer)];
  if (step.reduction >= 0) {
    has_arrived_[static_cast<size_t>(index)] = 1;
    advanceReduction(step.reduction);
  } else {
    if (!receive_buffers_.empty() && receive_buffers_[static_cast<size_t>(index)]) {
      StagingBuffer& buffer = receive_buffers_[static_cast<size_t>(index)];
      unpackRange(buffer.data, boxOf(step.place), step.begin, step.end, program_->places[static_cast<size_t>(step.place)].item_bytes);
      release(buffer);
    }
    onArrival(step.arrival);
  }
  postReceives();
}

void HostExecutor::onArrival(int32_t arrival) {
  const Program& todo = *program_;
  for (int32_t i = todo.dependents_begin[static_cast<size_t>(arrival)]; i < todo.dependents_begin[static_cast<size_t>(arrival) + 1]; ++i) {
    const int32_t send = todo.dependents[static_cast<size_t>(i)];
    const int32_t peer = todo.sends[static_cast<size_t>(send)].peer;
    if (--num_deps_[static_cast<size_t>(send)] > 0 || next_send_[static_cast<size_t>(peer)] != send) {
      continue;
    }
    const int32_t first_staged = firstStagedSend();
    postSendsTo(peer);
    if (firstStagedSend() != first_staged) {
      postStagedSends();
    }
  }
}

/// Copies one slice's worth of what this rank keeps; the rest follows in a task of its own.
void HostExecutor::copySlice() {
  int64_t left_bytes = kCopySliceBytes;
  while (copy_index_ < program_->copies.size()) {
    const CopyStep& step = program_->copies[copy_index_];
    const int64_t item_bytes = program_->places[static_cast<size_t>(step.src_place)].item_bytes;
    const int64_t end = std::min(step.num_elements, copy_element_ + std::max<int64_t>(1, left_bytes / item_bytes));
    copyRange(boxOf(step.src_place), boxOf(step.dst_place), copy_element_, end, item_bytes);
    left_bytes -= (end - copy_element_) * item_bytes;
    copy_element_ = end;
    if (end == step.num_elements) {
      ++copy_index_;
      copy_element_ = 0;
      --num_open_;
    }
    if (left_bytes <= 0 && copy_index_ < program_->copies.size()) {
      if (self_ == nullptr) {
        self_ = std::make_shared<HostExecutor*>(this);
      }
      transport_.post([self = self_] {
        if (*self != nullptr) {
          (*self)->handle({EventKind::kCopy, 0});
        }
      });
      return;
    }
  }
}

void HostExecutor::release(StagingBuffer& buffer) {
  pool_.release(buffer, *this);
  buffer = {};
  has_released_ = true;
}

void HostExecutor::releaseAll() {
  for (StagingBuffer& buffer : send_buffers_) {
    if (buffer) {
      release(buffer);
    }
  }
  for (StagingBuffer& buffer : receive_buffers_) {
    if (buffer) {
      release(buffer);
    }
  }
  for (ReduceState& state : reduce_states_) {
    if (state.staged) {
      release(state.staged);
    }
  }
}

std::vector<PeerProgress> HostExecutor::progress() const {
  std::vector<PeerProgress> out;
  for (size_t i = 0; i < program_->peer_ranks.size(); ++i) {
    out.push_back({program_->peer_ranks[i], num_sent_[i], program_->sends_of_peer[i], num_received_[i], program_->receives_of_peer[i]});
  }
  return out;
}

}  // namespace xmesh::runtime
