#include "pipeline/stage_runner.h"

#include <ATen/ops/add.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "core/error.h"
#include "pipeline/collective_watch.h"

namespace xmesh::pipeline {

using torch::autograd::Edge;

std::vector<size_t> EdgeValues::differentiable() const {
  std::vector<size_t> out;
  for (size_t i = 0; i < is_differentiable.size(); ++i) {
    if (is_differentiable[i] != 0) {
      out.push_back(i);
    }
  }
  return out;
}

StageRunner::StageRunner(std::vector<StageValues> stages, std::vector<EdgeValues> edges, Forward forward)
    : edges_(std::move(edges)), forward_(std::move(forward)) {
  for (StageValues& stage_values : stages) {
    StageCrossings& crossings = crossings_[stage_values.stage];
    crossings.inputs.resize(stage_values.inputs.size());
    crossings.outputs.resize(stage_values.outputs.size());
    for (const EdgeValues& edge : edges_) {
      for (size_t i = 0; i < edge.is_differentiable.size(); ++i) {
        const bool is_differentiable = edge.is_differentiable[i] != 0;
        if (edge.from == stage_values.stage) {
          Crossing& output = crossings.outputs.at(static_cast<size_t>(edge.from_positions.at(i)));
          output = {true, output.is_differentiable || is_differentiable};
        }
        if (edge.to == stage_values.stage) {
          crossings.inputs.at(static_cast<size_t>(edge.to_positions.at(i))) = {true, is_differentiable};
        }
      }
    }
    const int32_t stage = stage_values.stage;
    stages_.emplace(stage, std::move(stage_values));
  }
  for (const EdgeValues& edge : edges_) {
    differentiable_.push_back(edge.differentiable());
  }
}

void StageRunner::beginStep(StepInputs inputs) {
  flights_.clear();
  step_ = std::move(inputs);
  weight_storages_.clear();
}

void StageRunner::endStep(bool is_done) {
  for (auto& [stage, shared] : shared_weights_) {
    if (is_done && shared.has_run) {
      shared.known_key = step_.weights_key;
    }
    shared.has_run = false;
  }
  splits_all_ = is_done && has_input_ ? !has_whole_ : splits_all_;
  has_whole_ = has_input_ = false;
  flights_.clear();
  step_ = {};
}

void StageRunner::run(const core::Action& action) {
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

void StageRunner::forward(int32_t stage, int32_t microbatch) {
  const StageValues& stage_values = valuesOf(stage);
  Flight& flight = this->flight(stage, microbatch);
  flight.inputs.resize(stage_values.inputs.size());
  if (!stage_values.model_positions.empty()) {
    const std::vector<at::Tensor>& given = step_.model_inputs.at(stage).at(static_cast<size_t>(microbatch));
    for (size_t i = 0; i < stage_values.model_positions.size(); ++i) {
      flight.inputs[static_cast<size_t>(stage_values.model_positions[i])] = given.at(i);
    }
  }
  keepRoots(stage_values, flight, forward_(stage, microbatch, flight.inputs), microbatch);
  if (!step_.has_backward) {
    flight.inputs.clear();
  }
  handOver(stage, microbatch, false);
}

void StageRunner::keepRoots(const StageValues& stage_values, Flight& flight, const ForwardResult& result, int32_t microbatch) {
  if (result.outputs.size() != stage_values.outputs.size()) {
    throw core::InvalidArgument("stage " + std::to_string(stage_values.stage) + " returned " + std::to_string(result.outputs.size()) +
                                " tensors, expected " + std::to_string(stage_values.outputs.size()));
  }
  const std::vector<Crossing>& crossings = crossings_.at(stage_values.stage).outputs;
  flight.outputs.resize(result.outputs.size());
  flight.roots.resize(result.outputs.size());
  for (size_t i = 0; i < result.outputs.size(); ++i) {
    if (!crossings[i].crosses) {
      continue;
    }
    const at::Tensor& output = result.outputs[i];
    flight.outputs[i] = output.detach();
    if (!step_.has_backward || !output.requires_grad()) {
      continue;
    }
    if (!crossings[i].is_differentiable) {
      throw core::InvalidArgument("value " + stage_values.outputs[i] + " of stage " + std::to_string(stage_values.stage) +
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

/// The sum over the consumers, in the order of their stages.
std::vector<at::Tensor> StageRunner::sumGradients(int32_t stage, const Flight& flight) const {
  std::vector<at::Tensor> sums(flight.roots.size());
  for (const auto& [index, gradients] : flight.gradients) {
    const EdgeValues& edge = edges_[static_cast<size_t>(index)];
    core::require(edge.from == stage, "a gradient came to a stage that did not make its value");
    const std::vector<size_t>& chosen = differentiable(index);
    for (size_t i = 0; i < chosen.size(); ++i) {
      if (edge.drops_gradient[chosen[i]] != 0) {
        continue;
      }
      at::Tensor& sum = sums[static_cast<size_t>(edge.from_positions[chosen[i]])];
      sum = sum.defined() ? at::add(sum, gradients.at(i)) : gradients.at(i);
    }
  }
  return sums;
}

StageRunner::Roots StageRunner::takeRoots(int32_t stage, Flight& flight) const {
  Roots roots;
  if (flight.loss.has_value()) {
    roots.edges.push_back(std::move(*flight.loss));
    roots.gradients.push_back(std::move(flight.loss_gradient));
    flight.loss.reset();
  }
  std::vector<at::Tensor> sums = sumGradients(stage, flight);
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
  Flight& flight = this->flight(stage, microbatch);
  const Roots roots = takeRoots(stage, flight);
  if (!roots.edges.empty()) {
    torch::autograd::Engine::get_default_engine().execute(roots.edges, roots.gradients, /*keep_graph=*/false, /*create_graph=*/false,
                                                          /*accumulate_grad=*/true, {});
  }
  const std::vector<Crossing>& crossings = crossings_.at(stage).inputs;
  flight.input_gradients.resize(flight.inputs.size());
  for (size_t i = 0; i < flight.inputs.size(); ++i) {
    if (crossings[i].is_differentiable) {
      const at::Tensor gradient = std::exchange(flight.inputs[i].mutable_grad(), {});
      flight.input_gradients[i] = gradient.defined() ? gradient.detach() : at::zeros_like(flight.inputs[i]);
    }
  }
  handOver(stage, microbatch, true);
}

void StageRunner::backwardInput(int32_t stage, int32_t microbatch) {
  Flight& flight = this->flight(stage, microbatch);
  const std::vector<Crossing>& crossings = crossings_.at(stage).inputs;
  std::vector<size_t> wanted;
  std::vector<at::Tensor> inputs;
  for (size_t i = 0; i < flight.inputs.size(); ++i) {
    if (crossings[i].is_differentiable) {
      wanted.push_back(i);
      inputs.push_back(flight.inputs[i]);
    }
  }
  Roots roots = takeRoots(stage, flight);
  InputBackward done = backwardInputs(std::move(roots.edges), std::move(roots.gradients), inputs);
  flight.weights = std::move(done.weights);
  if (step_.is_measured) {
    weight_storages_[stage] = flight.weights.heldStorages();
  }
  if (done.whole_because.empty()) {
    whole_because_.erase(stage);
  } else {
    whole_because_[stage] = std::move(done.whole_because);
    has_whole_ = has_whole_ || !step_.is_measured || microbatch > 0;  // the first one's forward ran under the hooks that count memory
  }
  has_input_ = true;
  flight.input_gradients.resize(flight.inputs.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    const at::Tensor& gradient = done.gradients[i];
    flight.input_gradients[wanted[i]] = gradient.defined() ? gradient.detach() : at::zeros_like(inputs[i]);
  }
  flight.inputs.clear();
  handOver(stage, microbatch, true);
}

void StageRunner::backwardWeight(int32_t stage, int32_t microbatch) {
  WeightBackward weights = std::exchange(flight(stage, microbatch).weights, {});
  if (valuesOf(stage).is_alone) {
    return weights.run();
  }
  SharedWeights& shared = shared_weights_[stage];
  const CollectiveWatch watch;
  weights.run();
  shared.has_run = true;
  shared.has_collective = shared.has_collective || watch.hasSeen();
}

bool StageRunner::mayRunEarly(int32_t stage) const {
  if (!step_.runs_weights_early || has_whole_ || (stages_.size() > 1 && !splits_all_)) {
    return false;
  }
  if (valuesOf(stage).is_alone) {
    return true;
  }
  const auto found = shared_weights_.find(stage);
  return found != shared_weights_.end() && found->second.known_key == step_.weights_key && !found->second.has_collective;
}

bool StageRunner::mayRunEarlyNext(int32_t stage) const {
  if (!splits_all_) {
    return false;
  }
  const auto found = shared_weights_.find(stage);
  return valuesOf(stage).is_alone || (found != shared_weights_.end() && found->second.known_key.has_value() && !found->second.has_collective);
}

/// Gives values, or gradients, to stages of this rank that need no transfer.
void StageRunner::handOver(int32_t stage, int32_t microbatch, bool is_gradient) {
  for (size_t i = 0; i < edges_.size(); ++i) {
    const auto index = static_cast<int32_t>(i);
    if (!edges_[i].is_local) {
      continue;
    }
    if (!is_gradient && edges_[i].from == stage) {
      std::vector<at::Tensor> values = takeValues(index, microbatch);
      for (at::Tensor& value : values) {
        value = value.detach();
      }
      putValues(index, microbatch, std::move(values));
    } else if (is_gradient && edges_[i].to == stage) {
      putGradients(index, microbatch, takeGradients(index, microbatch));
    }
  }
}

void StageRunner::release(const core::Action& action) {
  switch (core::flightChangeOf(action.kind)) {
    case core::FlightChange::kBegins:
      if (step_.has_backward) {
        flight(action.stage, action.microbatch).outputs.clear();
        return;
      }
      break;
    case core::FlightChange::kGoesOn:
      flight(action.stage, action.microbatch).input_gradients.clear();
      return;
    case core::FlightChange::kEnds:
      break;
  }
  flights_.erase({action.stage, action.microbatch});
}

void StageRunner::putValues(int32_t edge, int32_t microbatch, std::vector<at::Tensor> values) {
  const EdgeValues& edge_values = edges_.at(static_cast<size_t>(edge));
  Flight& flight = this->flight(edge_values.to, microbatch);
  flight.inputs.resize(valuesOf(edge_values.to).inputs.size());
  for (size_t i = 0; i < values.size(); ++i) {
    if (step_.has_backward && edge_values.is_differentiable[i] != 0) {
      values[i].requires_grad_();
    }
    flight.inputs[static_cast<size_t>(edge_values.to_positions[i])] = std::move(values[i]);
  }
}

std::vector<at::Tensor> StageRunner::takeValues(int32_t edge, int32_t microbatch) {
  const EdgeValues& edge_values = edges_.at(static_cast<size_t>(edge));
  Flight& flight = this->flight(edge_values.from, microbatch);
  std::vector<at::Tensor> out;
  for (const int64_t position : edge_values.from_positions) {
    out.push_back(flight.outputs.at(static_cast<size_t>(position)));
  }
  return out;
}

void StageRunner::putGradients(int32_t edge, int32_t microbatch, std::vector<at::Tensor> gradients) {
  flight(edges_.at(static_cast<size_t>(edge)).from, microbatch).gradients[edge] = std::move(gradients);
}

std::vector<at::Tensor> StageRunner::takeGradients(int32_t edge, int32_t microbatch) {
  const EdgeValues& edge_values = edges_.at(static_cast<size_t>(edge));
  Flight& flight = this->flight(edge_values.to, microbatch);
  std::vector<at::Tensor> out;
  for (const size_t i : differentiable(edge)) {
    out.push_back(flight.input_gradients.at(static_cast<size_t>(edge_values.to_positions[i])));
  }
  return out;
}

}  // namespace xmesh::pipeline
