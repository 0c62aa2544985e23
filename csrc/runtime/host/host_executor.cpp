#include "runtime/host/host_executor.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace xmesh::runtime {

HostExecutor::HostExecutor(std::shared_ptr<const Program> program, transport::HostTransport& transport, uint64_t call,
                           std::vector<int32_t> group_rank_of_peer, std::vector<LocalTensor> src, std::vector<LocalTensor> dst, StagingPool& pool,
                           std::function<void()> on_done)
    : program_(std::move(program)),
      transport_(transport),
      call_(call),
      group_rank_of_peer_(std::move(group_rank_of_peer)),
      staging_(pool, *this),
      on_done_(std::move(on_done)),
      reductions_(*program_, boxes_, staging_) {
  const Program& todo = *program_;
  todo.checkLocalTensors(src, dst);
  if (group_rank_of_peer_.size() != todo.peer_ranks.size()) {
    throw core::InvalidArgument("expected the group ranks of " + std::to_string(todo.peer_ranks.size()) + " peers, got " +
                                std::to_string(group_rank_of_peer_.size()));
  }
  boxes_.reserve(todo.boxes.size());
  for (const SliceBox& box : todo.boxes) {
    const LocalTensor& tensor = (box.is_src ? src : dst)[static_cast<size_t>(box.tensor)];
    boxes_.push_back(stridedBox(tensor, box.offsets.data(), box.extents.data(), box.item_bytes));
  }
  num_deps_.reserve(todo.sends.size());
  for (size_t i = 0; i < todo.sends.size(); ++i) {
    const SendStep& step = todo.sends[i];
    num_deps_.push_back(step.num_deps);
    if (step.reduction < 0 && contiguousRun(boxOf(step.box), step.begin, step.end, todo.boxes[static_cast<size_t>(step.box)].item_bytes) == nullptr) {
      staged_sends_.push_back(static_cast<int32_t>(i));
    }
  }
  next_send_ = todo.first_send_of_track;
  num_sent_.assign(todo.peer_ranks.size(), 0);
  num_received_.assign(todo.peer_ranks.size(), 0);
  send_buffers_.resize(staged_sends_.empty() ? 0 : todo.sends.size());
  num_open_ = todo.numSends() + todo.numReceives() + static_cast<int64_t>(todo.copies.size());
}

HostExecutor::~HostExecutor() {
  if (phase_ == Phase::kRunning) {
    cancel();
  }
}

void HostExecutor::start(bool may_write) {
  core::require(phase_ == Phase::kNew, "an operation can be started only once");
  phase_ = Phase::kRunning;
  may_write_ = may_write;
  handle({EventKind::kStart, 0});
}

void HostExecutor::allowWrites() {
  if (!std::exchange(may_write_, true)) {
    handle({EventKind::kMayWrite, 0});
  }
}

void HostExecutor::cancel() {
  if (phase_ != Phase::kRunning) {
    return;
  }
  closeTracks();
  transportGone();
  staging_.pool().serve();
}

void HostExecutor::closeTracks() {
  for (const int32_t track : program_->tracks) {
    transport_.close(operationOf(track));
  }
}

void HostExecutor::transportGone() {
  if (phase_ != Phase::kRunning) {
    return;
  }
  phase_ = Phase::kCanceled;
  dropTasks();
  releaseAll();
  staging_.forget();
}

void HostExecutor::onSent(int64_t cookie) { handle({EventKind::kSent, static_cast<int32_t>(cookie)}); }

void HostExecutor::onReceived(int64_t cookie) { handle({EventKind::kReceived, static_cast<int32_t>(cookie)}); }

void HostExecutor::handle(Event event) {
  if (is_handling_) {
    pending_.push_back(event);
    return;
  }
  is_handling_ = true;
  packed_bytes_ = 0;
  process(event);
  for (size_t i = 0; i < pending_.size(); ++i) {
    process(pending_[i]);
  }
  pending_.clear();
  is_handling_ = false;
  settle();
}

/// Handles the event in a task of its own: the transport has its turn before.
void HostExecutor::handleSoon(Event event) {
  if (self_ == nullptr) {
    self_ = std::make_shared<HostExecutor*>(this);
  }
  transport_.post([self = self_, event] {
    if (*self != nullptr) {
      (*self)->handle(event);
    }
  });
}

void HostExecutor::dropTasks() {
  if (self_ != nullptr) {
    *self_ = nullptr;
  }
}

void HostExecutor::process(Event event) {
  if (phase_ != Phase::kRunning) {
    return;
  }
  switch (event.kind) {
    case EventKind::kStart:
      return begin();
    case EventKind::kMayWrite:
      return beginToWrite();
    case EventKind::kSent:
      return takeSent(event.index);
    case EventKind::kReceived:
      return takeReceived(event.index);
    case EventKind::kStagingFree:
      postReceives();
      return postWaitingSends();
    case EventKind::kPack:
      will_pack_ = false;
      staging_.wakeOthers();  // they may have waited behind what was put off
      return postWaitingSends();
    case EventKind::kUnpack:
      return unpackSlice();
    case EventKind::kCopy:
      return copySlice();
  }
}

void HostExecutor::takeSent(int32_t index) {
  const SendStep& step = program_->sends[static_cast<size_t>(index)];
  --num_open_;
  ++num_sent_[static_cast<size_t>(step.peer)];
  if (step.reduction >= 0) {
    reductions_.release(step.reduction);
    postReceives();
  } else if (!send_buffers_.empty() && send_buffers_[static_cast<size_t>(index)]) {
    unpackBeforeRelease(index);
    staging_.release(send_buffers_[static_cast<size_t>(index)]);
    postWaitingSends();
  }
}

/// Ends an event: reports the end of the operation, or lets others have what was released. Nothing of this object is touched afterwards.
void HostExecutor::settle() {
  if (phase_ == Phase::kRunning && num_open_ == 0) {
    phase_ = Phase::kDone;
    dropTasks();
    closeTracks();
    staging_.forget();
    staging_.pool().serve();
    const std::function<void()> on_done = std::move(on_done_);
    if (on_done) {
      on_done();
    }
    return;
  }
  staging_.serve();
}

void HostExecutor::begin() {
  for (const int32_t track : program_->tracks) {
    transport_.open(operationOf(track), *this);
  }
  postReceives();
  // In plan order over all peers, as far as nothing has to be waited for.
  for (size_t i = 0; i < program_->sends.size(); ++i) {
    int32_t& next = nextSendLike(static_cast<int32_t>(i));
    if (next == static_cast<int32_t>(i) && num_deps_[i] == 0 && postSend(next)) {
      next = program_->sends[i].next_of_track;
    }
  }
  if (may_write_ && !program_->copies.empty()) {
    copySlice();
  }
}

void HostExecutor::beginToWrite() {
  postReceives();
  if (!program_->copies.empty()) {
    copySlice();
  }
}

/// Copies one slice's worth of what this rank keeps; the rest follows in a task of its own.
void HostExecutor::copySlice() {
  int64_t left_bytes = kSliceBytes;
  while (copy_index_ < program_->copies.size()) {
    const CopyStep& step = program_->copies[copy_index_];
    const int64_t item_bytes = program_->boxes[static_cast<size_t>(step.src_box)].item_bytes;
    const int64_t end = std::min(step.num_elements, copy_element_ + std::max<int64_t>(1, left_bytes / item_bytes));
    copyRange(boxOf(step.src_box), boxOf(step.dst_box), copy_element_, end, item_bytes);
    left_bytes -= (end - copy_element_) * item_bytes;
    copy_element_ = end;
    if (end == step.num_elements) {
      ++copy_index_;
      copy_element_ = 0;
      --num_open_;
    }
    if (left_bytes <= 0 && copy_index_ < program_->copies.size()) {
      return handleSoon({EventKind::kCopy, 0});
    }
  }
}

void HostExecutor::releaseAll() {
  packed_arrivals_.clear();
  for (StagingBuffer& buffer : send_buffers_) {
    staging_.release(buffer);
  }
  for (StagingBuffer& buffer : receive_buffers_) {
    staging_.release(buffer);
  }
  reductions_.releaseAll();
}

std::vector<PeerProgress> HostExecutor::progress() const {
  std::vector<PeerProgress> out;
  for (size_t i = 0; i < program_->peer_ranks.size(); ++i) {
    out.push_back({program_->peer_ranks[i], num_sent_[i], program_->sends_of_peer[i], num_received_[i], program_->receives_of_peer[i]});
  }
  return out;
}

}  // namespace xmesh::runtime
