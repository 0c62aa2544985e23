#include "c10d/pipeline_boundary.h"

#include <mutex>
#include <utility>

#include "core/error.h"

namespace xmesh::c10d_backend {

using runtime::Transfer;

/// Ends are noted on the network's thread.
struct PipelineBoundary::SharedSpans {
  std::mutex mutex;
  std::vector<TransferSpan> spans;
};

void PipelineBoundary::beginStep(std::vector<std::shared_ptr<const EdgePlans>> plans, uint64_t step) {
  plans_ = std::move(plans);
  for (size_t i = lanes_.size(); i < plans_.size(); ++i) {
    lanes_.push_back({traffic_->lane(plans_[i]->lane), traffic_->lane(plans_[i]->lane + "/gradient")});
  }
  step_ = step;
  spans_ = std::make_shared<SharedSpans>();
}

void PipelineBoundary::endStep() {
  receives_.clear();
  sends_.clear();
}

const PipelineTraffic::Prepared& PipelineBoundary::planOf(const Transfer& transfer) const {
  const EdgePlans& plans = *plans_.at(static_cast<size_t>(transfer.edge));
  return (transfer.is_gradient ? plans.backward : plans.forward).at(static_cast<size_t>(transfer.microbatch));
}

std::vector<at::Tensor> PipelineBoundary::buffersFor(const Transfer& transfer) {
  const EdgeLayout& edge = runner_.edges()[static_cast<size_t>(transfer.edge)];
  const std::vector<size_t>& differentiable = runner_.differentiable(transfer.edge);
  const runtime::Program& program = *planOf(transfer)->program;
  std::vector<at::Tensor> out;
  out.reserve(static_cast<size_t>(program.numTensors()));
  for (int64_t tensor = 0; tensor < program.numTensors(); ++tensor) {
    const auto i = static_cast<size_t>(tensor);
    out.push_back(pool_.take(program.dstShape(tensor).value(), edge.dtypes.at(transfer.is_gradient ? differentiable.at(i) : i)));
  }
  return out;
}

PipelineTraffic::Call PipelineBoundary::begin(const Transfer& transfer, const std::vector<at::Tensor>& src, const std::vector<at::Tensor>& dst,
                                              bool is_send) {
  const auto index = static_cast<size_t>(transfer.edge);
  const std::shared_ptr<const EdgePlans>& plans = plans_[index];
  const EdgeLayout& edge = runner_.edges()[index];
  const uint64_t count = step_ * plans->forward.size() + static_cast<uint64_t>(transfer.microbatch);
  const int64_t begin_ns = runtime::steadyNanoseconds();
  PipelineTraffic::Call call = traffic_->begin(transfer.is_gradient ? lanes_[index].gradients : lanes_[index].values, count, planOf(transfer), src,
                                               dst, [transfer, from = edge.from, to = edge.to, step = step_, plans] {
                                                 return std::string(transfer.is_gradient ? "the gradients of [" : "the values [") + plans->values +
                                                        "] from stage " + std::to_string(transfer.is_gradient ? to : from) + " to stage " +
                                                        std::to_string(transfer.is_gradient ? from : to) + ", microbatch " +
                                                        std::to_string(transfer.microbatch) + " of step " + std::to_string(step);
                                               });
  call->onCompletion([spans = spans_, transfer, is_send, begin_ns] {
    const std::lock_guard lock(spans->mutex);
    spans->spans.push_back({transfer, is_send, begin_ns, runtime::steadyNanoseconds()});
  });
  return call;
}

void PipelineBoundary::postReceive(const Transfer& transfer) {
  if (plans_.at(static_cast<size_t>(transfer.edge))->is_joint) {
    return;  // begun where the value is made, which is on this rank
  }
  std::vector<at::Tensor> buffers = buffersFor(transfer);
  PipelineTraffic::Call call = begin(transfer, {}, buffers, false);
  receives_[transfer] = {std::move(call), std::move(buffers)};
}

void PipelineBoundary::waitReceive(const Transfer& transfer) {
  auto found = receives_.find(transfer);
  core::require(found != receives_.end(), "a value is needed before it is made: the schedule is not valid");
  traffic_->wait(found->second.call);
  Pending pending = std::move(found->second);
  receives_.erase(found);
  if (transfer.is_gradient) {
    runner_.putGradients(transfer.edge, transfer.microbatch, std::move(pending.buffers));
  } else {
    runner_.putValues(transfer.edge, transfer.microbatch, std::move(pending.buffers));
  }
}

void PipelineBoundary::send(const Transfer& transfer) {
  const std::vector<at::Tensor> values =
      transfer.is_gradient ? runner_.takeGradients(transfer.edge, transfer.microbatch) : runner_.takeValues(transfer.edge, transfer.microbatch);
  if (plans_.at(static_cast<size_t>(transfer.edge))->is_joint) {
    std::vector<at::Tensor> buffers = buffersFor(transfer);
    PipelineTraffic::Call call = begin(transfer, values, buffers, true);
    receives_[transfer] = {std::move(call), std::move(buffers)};
    return;
  }
  while (!sends_.empty() && sends_.front()->isCompleted()) {
    traffic_->wait(sends_.front());
    sends_.pop_front();
  }
  sends_.push_back(begin(transfer, values, {}, true));
}

void PipelineBoundary::drain() {
  for (; !sends_.empty(); sends_.pop_front()) {
    traffic_->wait(sends_.front());
  }
}

std::vector<TransferSpan> PipelineBoundary::spans() const {
  if (spans_ == nullptr) {
    return {};
  }
  const std::lock_guard lock(spans_->mutex);
  return spans_->spans;
}

}  // namespace xmesh::c10d_backend
