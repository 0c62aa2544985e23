#include "pipeline/boundary.h"

#include <ATen/ops/empty.h>

#include <chrono>
#include <utility>

#include "core/error.h"

namespace xmesh::pipeline {

using runtime::Transfer;

void PipelineBoundary::beginStep(StepTransfers plans) {
  plans_ = std::move(plans);
  for (size_t i = lanes_.size(); i < plans_.edges.size(); ++i) {
    lanes_.push_back({traffic_->lane(plans_.edges[i]->lane), traffic_->lane(plans_.edges[i]->lane + "/gradient")});
  }
  pool_.beginStep();
  waited_.clear();
}

void PipelineBoundary::endStep() {
  traffic_->flush();
  receives_.clear();
  sends_.clear();
}

const PipelineTraffic::Prepared& PipelineBoundary::planOf(const Transfer& transfer) const {
  const EdgePlans& plans = *plans_.edges.at(static_cast<size_t>(transfer.edge));
  return (transfer.is_gradient ? plans.backward : plans.forward).at(static_cast<size_t>(transfer.microbatch));
}

std::vector<at::Tensor> PipelineBoundary::buffersFor(const Transfer& transfer) {
  const EdgeValues& edge = flights_.edges()[static_cast<size_t>(transfer.edge)];
  const c10::Device device = flights_.stage(transfer.is_gradient ? edge.from : edge.to).device;
  const std::vector<at::ScalarType>& dtypes = plans_.edges.at(static_cast<size_t>(transfer.edge))->dtypes;
  const std::vector<size_t>& differentiable = flights_.differentiable(transfer.edge);
  const runtime::Program& program = *planOf(transfer)->program;
  std::vector<at::Tensor> out;
  out.reserve(static_cast<size_t>(program.numDestinations()));
  for (int64_t tensor = 0; tensor < program.numDestinations(); ++tensor) {
    const auto i = static_cast<size_t>(tensor);
    const std::vector<int64_t>& shape = program.dstShape(tensor).value();
    const at::ScalarType dtype = dtypes.at(transfer.is_gradient ? differentiable.at(i) : i);
    // Devices have allocators that keep memory, and know when their streams have passed its last use.
    out.push_back(device.is_cpu() ? pool_.take(shape, dtype) : at::empty(shape, at::TensorOptions(dtype).device(device)));
  }
  return out;
}

PipelineBoundary::Pending PipelineBoundary::begin(const Transfer& transfer, const std::vector<at::Tensor>& src, std::vector<at::Tensor> dst,
                                                  bool is_send) {
  const auto index = static_cast<size_t>(transfer.edge);
  const std::shared_ptr<const EdgePlans>& plans = plans_.edges[index];
  const EdgeValues& edge = flights_.edges()[index];
  const uint64_t count = plans_.first_microbatch + static_cast<uint64_t>(transfer.microbatch);
  const int64_t begin_ns = runtime::steadyNanoseconds();
  const auto describe = [transfer, from = edge.from, to = edge.to, segments = segments_, step = plans_.step, plans] {
    return std::string(transfer.is_gradient ? "the gradients of [" : "the values [") + plans->values + "] from " +
           segments->nameOf(transfer.is_gradient ? to : from) + " to " + segments->nameOf(transfer.is_gradient ? from : to) + ", microbatch " +
           std::to_string(transfer.microbatch) + " of step " + std::to_string(step);
  };
  const PipelineTraffic::Lane lane = transfer.is_gradient ? lanes_[index].gradients : lanes_[index].values;
  PipelineCall call = traffic_->begin(lane, count, planOf(transfer), src, dst, describe);
  return {std::move(call), {transfer, is_send, begin_ns, 0}, std::move(dst)};
}

void PipelineBoundary::wait(const Pending& pending) {
  traffic_->wait(pending.call);
  waited_.push_back({pending.call.call, pending.span});
}

std::vector<TrafficSpan> PipelineBoundary::spans() const {
  std::vector<TrafficSpan> out;
  for (const Waited& waited : waited_) {
    if (waited.call->isCompleted()) {
      TrafficSpan& span = out.emplace_back(waited.span);
      span.end_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(waited.call->endedAt().time_since_epoch()).count();
    }
  }
  return out;
}

void PipelineBoundary::postReceive(const Transfer& transfer) {
  receives_.insert_or_assign(transfer, begin(transfer, {}, buffersFor(transfer), false));
}

bool PipelineBoundary::hasArrived(const Transfer& transfer) const {
  const auto found = receives_.find(transfer);
  return found == receives_.end() || found->second.call.hasArrived();
}

void PipelineBoundary::waitReceive(const Transfer& transfer) {
  auto found = receives_.find(transfer);
  core::require(found != receives_.end(), "a value is needed before it is made: the schedule is not valid");
  wait(found->second);
  Pending pending = std::move(found->second);
  receives_.erase(found);
  if (transfer.is_gradient) {
    flights_.putGradients(transfer.edge, transfer.microbatch, std::move(pending.buffers));
  } else {
    flights_.putValues(transfer.edge, transfer.microbatch, std::move(pending.buffers));
  }
}

void PipelineBoundary::send(const Transfer& transfer) {
  const std::vector<at::Tensor> values =
      transfer.is_gradient ? flights_.takeGradients(transfer.edge, transfer.microbatch) : flights_.takeValues(transfer.edge, transfer.microbatch);
  if (plans_.edges.at(static_cast<size_t>(transfer.edge))->is_joint) {
    receives_.insert_or_assign(transfer, begin(transfer, values, buffersFor(transfer), true));
    return;
  }
  while (!sends_.empty() && sends_.front().call.hasArrived()) {
    wait(sends_.front());
    sends_.pop_front();
  }
  sends_.push_back(begin(transfer, values, {}, true));
}

void PipelineBoundary::drain() {
  for (; !sends_.empty(); sends_.pop_front()) {
    wait(sends_.front());
  }
}

}  // namespace xmesh::pipeline
