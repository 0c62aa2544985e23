#include "pipeline/stage_runner.h"

#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "core/error.h"
#include "pipeline/collective_watch.h"

namespace xmesh::pipeline {

StageRunner::StageRunner(Flights& flights, std::shared_ptr<const core::Segments> segments) : flights_(flights), segments_(std::move(segments)) {
  for (const int32_t stage : flights_.stages()) {
    WeightsGroup& group = groups_[weightsGroup(stage)];
    group.has_several = group.stage >= 0;
    group.stage = stage;
  }
}

void StageRunner::beginStep(StepInputs inputs) {
  flights_.begin(inputs.has_backward);
  step_ = std::move(inputs);
  weight_storages_.clear();
  device_times_.beginStep();
}

void StageRunner::endStep(bool is_done) {
  for (auto& [stage, shared] : shared_weights_) {
    if (is_done && shared.has_run) {
      shared.known_key = step_.weights_key;
    }
    shared.has_run = false;
  }
  for (auto& [number, group] : groups_) {
    group.splits_all = is_done && group.has_input ? !group.has_whole : group.splits_all;
    group.has_whole = group.has_input = false;
  }
  flights_.begin(/*has_backward=*/true);
  step_ = {};
}

void StageRunner::run(const core::Action& action) {
  const c10::Device device = flights_.stage(action.stage).device;
  if (device.is_cpu()) {
    return compute(action);
  }
  device_times_.begins(action, device);
  compute(action);
  device_times_.ends();
  if (step_.is_measured) {
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  }
}

void StageRunner::compute(const core::Action& action) {
  switch (action.kind) {
    case core::ActionKind::kForward:
      return forward(action.stage, action.microbatch);
    case core::ActionKind::kBackward:
      return backward(action.stage, action.microbatch);
    case core::ActionKind::kBackwardInput:
      return backwardInput(action.stage, action.microbatch);
    case core::ActionKind::kBackwardWeight:
      return backwardWeight(action.stage, action.microbatch);
  }
}

void StageRunner::follow(const core::Action& action) {
  if (step_.weights_done && core::flightChangeOf(action.kind) == core::FlightChange::kEnds) {
    const auto last = step_.last_weights.find(action.stage);
    step_.weights_done(action.stage, action.microbatch, last != step_.last_weights.end() && last->second == action);
  }
}

void StageRunner::forward(int32_t stage, int32_t microbatch) {
  const StageValues& stage_values = flights_.stage(stage);
  Flight& flight = flights_.at(stage, microbatch);
  flight.inputs.resize(stage_values.inputs.size());
  if (!stage_values.model_positions.empty()) {
    const std::vector<at::Tensor>& given = step_.model_inputs.at(stage).at(static_cast<size_t>(microbatch));
    for (size_t i = 0; i < stage_values.model_positions.size(); ++i) {
      flight.inputs[static_cast<size_t>(stage_values.model_positions[i])] = given.at(i);
    }
  }
  keepRoots(stage, microbatch, step_.forward(stage, microbatch, flight.inputs));
  if (!step_.has_backward) {
    flight.inputs.clear();
  }
  flights_.keepLeaves(stage, microbatch);
  flights_.handOver(stage, microbatch, false);
}

void StageRunner::keepRoots(int32_t stage, int32_t microbatch, const ForwardResult& result) {
  const StageValues& stage_values = flights_.stage(stage);
  if (result.outputs.size() != stage_values.outputs.size()) {
    throw core::InvalidArgument(segments_->nameOf(stage) + " returned " + std::to_string(result.outputs.size()) + " tensors, expected " +
                                std::to_string(stage_values.outputs.size()));
  }
  const std::vector<ValueUse>& uses = flights_.outputUses(stage);
  Flight& flight = flights_.at(stage, microbatch);
  flight.outputs.resize(result.outputs.size());
  flight.roots.resize(result.outputs.size());
  for (size_t i = 0; i < result.outputs.size(); ++i) {
    if (!uses[i].crosses) {
      continue;
    }
    const at::Tensor& output = result.outputs[i];
    flight.outputs[i] = output.detach();
    if (!step_.has_backward || !output.requires_grad()) {
      continue;
    }
    if (!uses[i].is_differentiable) {
      throw core::InvalidArgument("value " + stage_values.outputs[i] + " of " + segments_->nameOf(stage) +
                                  " requires grad, but it did not when the model was partitioned: make the engine after parameters have been frozen "
                                  "or unfrozen");
    }
    flight.roots[i] = torch::autograd::impl::gradient_edge(output);
  }
  if (step_.has_backward && result.loss.has_value() && result.loss->requires_grad()) {
    flight.loss = torch::autograd::impl::gradient_edge(*result.loss);
    flight.loss_gradient = lossGradient(*result.loss, microbatch);
  }
}

at::Tensor StageRunner::lossGradient(const at::Tensor& loss, int32_t microbatch) {
  const double weight = step_.loss_weights.at(static_cast<size_t>(microbatch));
  if (!loss_gradient_.defined() || loss_gradient_weight_ != weight || loss_gradient_.scalar_type() != loss.scalar_type() ||
      loss_gradient_.device() != loss.device()) {
    loss_gradient_ = at::full_like(loss, weight);
    loss_gradient_weight_ = weight;
  }
  return loss_gradient_;
}

StageRunner::Roots StageRunner::takeRoots(int32_t stage, int32_t microbatch) {
  Flight& flight = flights_.at(stage, microbatch);
  Roots roots;
  if (flight.loss.has_value()) {
    roots.edges.push_back(std::move(*flight.loss));
    roots.gradients.push_back(std::move(flight.loss_gradient));
    flight.loss.reset();
  }
  std::vector<at::Tensor> sums = flights_.sumOfGradients(stage, microbatch);
  for (size_t i = 0; i < sums.size(); ++i) {
    if (sums[i].defined() && flight.roots[i].is_valid()) {
      roots.edges.push_back(std::move(flight.roots[i]));
      roots.gradients.push_back(std::move(sums[i]));
    }
  }
  flight.roots.clear();
  flight.gradients.clear();
  return roots;
}

void StageRunner::backward(int32_t stage, int32_t microbatch) {
  Flight& flight = flights_.at(stage, microbatch);
  const Roots roots = takeRoots(stage, microbatch);
  if (!roots.edges.empty()) {
    torch::autograd::Engine::get_default_engine().execute(roots.edges, roots.gradients, /*keep_graph=*/false, /*create_graph=*/false,
                                                          /*accumulate_grad=*/true, {});
  }
  const std::vector<ValueUse>& uses = flights_.inputUses(stage);
  flight.input_gradients.resize(flight.inputs.size());
  for (size_t i = 0; i < flight.inputs.size(); ++i) {
    if (uses[i].is_differentiable) {
      const at::Tensor gradient = std::exchange(flight.inputs[i].mutable_grad(), {});
      flight.input_gradients[i] = gradient.defined() ? gradient.detach() : at::zeros_like(flight.inputs[i]);
    }
  }
  flights_.handOver(stage, microbatch, true);
}

void StageRunner::backwardInput(int32_t stage, int32_t microbatch) {
  Flight& flight = flights_.at(stage, microbatch);
  const std::vector<ValueUse>& uses = flights_.inputUses(stage);
  std::vector<size_t> wanted;
  std::vector<at::Tensor> inputs;
  for (size_t i = 0; i < flight.inputs.size(); ++i) {
    if (uses[i].is_differentiable) {
      wanted.push_back(i);
      inputs.push_back(flight.inputs[i]);
    }
  }
  Roots roots = takeRoots(stage, microbatch);
  InputBackward done = backwardInputs(std::move(roots.edges), std::move(roots.gradients), inputs, flights_.stage(stage).whole_because);
  flight.weights = std::move(done.weights);
  if (step_.is_measured) {
    weight_storages_[stage] = flight.weights.heldStorages();
  }
  WeightsGroup& group = groups_.at(weightsGroup(stage));
  if (done.whole_because.empty()) {
    whole_because_.erase(stage);
  } else {
    whole_because_[stage] = std::move(done.whole_because);
    group.has_whole = group.has_whole || !step_.is_measured || microbatch > 0;  // the first one's forward ran under the hooks that count memory
  }
  group.has_input = true;
  flight.input_gradients.resize(flight.inputs.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    const at::Tensor& gradient = done.gradients[i];
    flight.input_gradients[wanted[i]] = gradient.defined() ? gradient.detach() : at::zeros_like(inputs[i]);
  }
  flight.inputs.clear();
  flights_.handOver(stage, microbatch, true);
}

void StageRunner::backwardWeight(int32_t stage, int32_t microbatch) {
  WeightBackward weights = std::exchange(flights_.at(stage, microbatch).weights, {});
  if (flights_.stage(stage).is_alone) {
    return weights.run();
  }
  SharedWeights& shared = shared_weights_[stage];
  const CollectiveWatch watch;
  weights.run();
  shared.has_run = true;
  shared.has_collective = shared.has_collective || watch.hasSeen();
}

bool StageRunner::mayRunEarly(int32_t stage) const {
  const WeightsGroup& group = groupOf(stage);
  if (!step_.runs_weights_early || flights_.stage(stage).waits_in_weights || group.has_whole || (group.has_several && !group.splits_all)) {
    return false;
  }
  if (flights_.stage(stage).is_alone) {
    return true;
  }
  const auto found = shared_weights_.find(stage);
  return found != shared_weights_.end() && found->second.known_key == step_.weights_key && !found->second.has_collective;
}

bool StageRunner::mayRunEarlyNext(int32_t stage) const {
  if (!groupOf(stage).splits_all || flights_.stage(stage).waits_in_weights) {
    return false;
  }
  const auto found = shared_weights_.find(stage);
  return flights_.stage(stage).is_alone || (found != shared_weights_.end() && found->second.known_key.has_value() && !found->second.has_collective);
}

}  // namespace xmesh::pipeline
