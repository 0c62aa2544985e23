#include "pipeline/traffic.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <mutex>
#include <utility>

#include "c10d/movement.h"

namespace xmesh::pipeline {
namespace {

constexpr std::chrono::milliseconds kCauseTime{5'000};  ///< that a failure elsewhere may take to be heard of here; answers take 2 s

}  // namespace

struct PipelineTraffic::Description {
  std::mutex mutex;
  std::function<std::string()> describe;
};

PipelineTraffic::PipelineTraffic(std::shared_ptr<c10d_backend::ReshardGroup> group, std::vector<int64_t> ranks)
    : group_(std::move(group)),
      ranks_(std::move(ranks)),
      number_(group_->arrive(ranks_)),
      name_("pipeline " + std::to_string(number_) + " of ranks " + runtime::rankList(ranks_)),
      participants_(runtime::hashRanks(ranks_)),
      description_(std::make_shared<Description>()),
      enqueued_(group_->timeout(), [this] { group_->service().suspect(watch_->key()); }) {
  runtime::WatchRequest request;
  request.terms = group_->terms(ranks_, {}, name_);
  request.key = runtime::pipelineWatch(ranks_, number_);
  request.pipeline = number_;
  request.timeout = group_->timeout();
  request.describe = [description = description_] {
    const std::lock_guard lock(description->mutex);
    return description->describe ? description->describe() : std::string("is making the pipeline");
  };
  watch_ = group_->service().watch(std::move(request));
}

PipelineTraffic::~PipelineTraffic() { close(); }

void PipelineTraffic::describeBy(std::function<std::string()> describe) {
  if (!fork_.isHere()) {
    return;  // nobody asks, and who held the lock at the fork is not here to give it back
  }
  const std::lock_guard lock(description_->mutex);
  description_->describe = std::move(describe);
}

void PipelineTraffic::meet(const runtime::CallFields& fields) {
  runtime::MeetingRequest request;
  request.terms = group_->terms(ranks_, fields, name_);
  request.key = runtime::CallKey{participants_, runtime::hashBytes(name_ + "/meeting") | 1U, num_meetings_++};
  request.watch = watch_->key();
  request.timeout = group_->timeout();
  group_->service().meet(std::move(request))->wait();
}

PipelineTraffic::Lane PipelineTraffic::lane(const std::string& name) {
  auto known = lanes_.find(name);
  if (known == lanes_.end()) {
    known = lanes_.emplace(name, Lane{runtime::hashBytes(name_ + "/" + name) | 1U}).first;
  }
  return known->second;
}

PipelineCall PipelineTraffic::begin(Lane lane, uint64_t count, const Prepared& prepared, const std::vector<at::Tensor>& src,
                                    const std::vector<at::Tensor>& dst, std::function<std::string()> what) {
  c10d_backend::CallMovement moving = group_->movements().of(prepared, src, dst);
  runtime::TransferRequest request;
  request.movement = std::move(moving.movement);
  request.key = runtime::CallKey{participants_, lane.key, count};
  request.watch = watch_->key();
  request.phase = phase_;
  request.describe = std::move(what);
  return {group_->service().transfer(std::move(request)), std::move(moving.on_device)};
}

void PipelineTraffic::wait(const PipelineCall& call) {
  const auto has_come = [&call](std::chrono::milliseconds timeout) {
    return call.on_device != nullptr ? call.call->waitEnqueued(timeout) : call.call->wait(timeout);
  };
  const std::chrono::milliseconds timeout = group_->timeout();
  if (!has_come(timeout)) {
    group_->service().suspect(watch_->key());
    has_come(std::chrono::milliseconds(0));
  }
  if (call.on_device != nullptr) {
    call.on_device->orderCurrentStream();
  }
}

void PipelineTraffic::check() const {
  if (const std::optional<runtime::Failure> failure = watch_->failure()) {
    runtime::throwFailure(*failure);
  }
}

void PipelineTraffic::endsToo(const c10::intrusive_ptr<c10d_backend::ProcessGroupXmesh>& group) {
  watch_->onCompletion([watch = watch_.get(), weak = c10::weak_intrusive_ptr<c10d_backend::ProcessGroupXmesh>(group)] {
    const std::optional<runtime::Failure> failure = watch->failure();
    if (!failure.has_value()) {
      return;
    }
    if (const c10::intrusive_ptr<c10d_backend::ProcessGroupXmesh> ended = weak.lock()) {
      ended->endCollectives(*failure);
    }
  });
}

PipelineTraffic::Mark PipelineTraffic::mark(c10::Device device) {
  auto mark = std::make_shared<c10::Event>(device.type());
  mark->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return mark;
}

void PipelineTraffic::expectEnd(const Mark& begin, c10::Device device) {
  last_end_ = mark(device);
  enqueued_.add([begin] { return begin->query(); }, [end = last_end_] { return end->query(); });
}

void PipelineTraffic::awaitEnds() {
  if (const Mark last = std::exchange(last_end_, nullptr)) {
    last->synchronize();
    check();
  }
}

void PipelineTraffic::awaitCause(bool suspects) {
  check();
  if (suspects) {
    group_->service().suspect(watch_->key());
  }
  watch_->wait(kCauseTime);
}

void PipelineTraffic::fail(runtime::Failure failure) { group_->service().failCall(watch_->key(), std::move(failure)); }

void PipelineTraffic::close() {
  if (!std::exchange(is_closed_, true) && fork_.isHere()) {
    enqueued_.close();
    const std::string text = "rank " + std::to_string(group_->globalRank()) + " has closed the pipeline's engine";
    group_->service().release(watch_->key(), runtime::Failure{runtime::FailureKind::kPeer, text, {group_->globalRank()}, -1, -1, phase_ + 1});
    describeBy([] { return std::string("has closed the pipeline"); });
  }
}

}  // namespace xmesh::pipeline
