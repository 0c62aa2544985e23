#include "pipeline/traffic.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <string>
#include <utility>

namespace xmesh::pipeline {
namespace {

constexpr std::chrono::milliseconds kCauseTime{5'000};  ///< that a failure elsewhere may take to be heard of here; answers take 2 s

c10d_backend::WatchedTransfers::Options optionsOf(c10d_backend::ReshardGroup& group, std::vector<int64_t> ranks) {
  c10d_backend::WatchedTransfers::Options out;
  out.pipeline = group.arrive(ranks);
  out.name = "pipeline " + std::to_string(out.pipeline) + " of ranks " + runtime::rankList(ranks);
  out.watch = runtime::pipelineWatch(ranks, out.pipeline);
  out.at_first = "is making the pipeline";
  out.ranks = std::move(ranks);
  return out;
}

}  // namespace

PipelineTraffic::PipelineTraffic(std::shared_ptr<c10d_backend::ReshardGroup> group, std::vector<int64_t> ranks)
    : WatchedTransfers(group->endpoint(), optionsOf(*group, std::move(ranks))),
      group_(std::move(group)),
      enqueued_(endpoint()->timeout(), [this] { suspect(); }) {}

void PipelineTraffic::endsToo(const c10::intrusive_ptr<c10d_backend::ProcessGroupXmesh>& group) {
  watch().onCompletion([watch = &watch(), weak = c10::weak_intrusive_ptr<c10d_backend::ProcessGroupXmesh>(group)] {
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
    suspect();
  }
  watch().wait(kCauseTime);
}

void PipelineTraffic::close() {
  enqueued_.close();
  describeBy([] { return std::string("has closed the pipeline"); });
  WatchedTransfers::close("rank " + std::to_string(endpoint()->globalRank()) + " has closed the pipeline's engine");
}

}  // namespace xmesh::pipeline
