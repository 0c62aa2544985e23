#include "c10d/stage_runner.h"

#include <ATen/ops/add.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "core/error.h"

namespace xmesh::c10d_backend {

using torch::autograd::Edge;

std::vector<size_t> EdgeLayout::differentiable() const {
  std::vector<size_t> out;
  for (size_t i = 0; i < is_differentiable.size(); ++i) {
    if (is_differentiable[i] != 0) {
      out.push_back(i);
    }
  }
  return out;
}

StageRunner::StageRunner(std::vector<StageLayout> stages, std::vector<EdgeLayout> edges, Forward forward)
    : edges_(std::move(edges)), forward_(std::move(forward)) {
  for (StageLayout& layout : stages) {
    const int32_t stage = layout.stage;
    stages_.emplace(stage, std::move(layout));
  }
}

void StageRunner::beginStep(StepInputs inputs) {
  flights_.clear();
  step_ = std::move(inputs);
}

void StageRunner::endStep() {
  flights_.clear();
  step_ = {};
}

bool StageRunner::isDifferentiableOutput(int32_t stage, int64_t position) const {
  for (const EdgeLayout& edge : edges_) {
    for (size_t i = 0; edge.from == stage && i < edge.from_positions.size(); ++i) {
      if (edge.from_positions[i] == position && edge.is_differentiable[i] != 0) {
        return true;
      }
    }
  }
  return false;
}

bool StageRunner::isDifferentiableInput(int32_t stage, int64_t position) const {
  for (const EdgeLayout& edge : edges_) {
    for (size_t i = 0; edge.to == stage && i < edge.to_positions.size(); ++i) {
      if (edge.to_positions[i] == position) {
        return edge.is_differentiable[i] != 0;
      }
    }
  }
  return false;
}

void StageRunner::forward(int32_t stage, int32_t microbatch) {
  const StageLayout& layout = layoutOf(stage);
  Flight& flight = this->flight(stage, microbatch);
  flight.inputs.resize(layout.inputs.size());
  if (!layout.model_positions.empty()) {
    const std::vector<at::Tensor>& given = step_.model_inputs.at(stage).at(static_cast<size_t>(microbatch));
    for (size_t i = 0; i < layout.model_positions.size(); ++i) {
      flight.inputs[static_cast<size_t>(layout.model_positions[i])] = given.at(i);
    }
  }
  keepRoots(layout, flight, forward_(stage, microbatch, flight.inputs));
  if (!step_.has_backward) {
    flight.inputs.clear();
  }
  handOver(stage, microbatch, false);
}

void StageRunner::keepRoots(const StageLayout& layout, Flight& flight, ForwardResult result) const {
  core::require(result.outputs.size() == layout.outputs.size(), "stage " + std::to_string(layout.stage) + " returned " +
                                                                    std::to_string(result.outputs.size()) + " tensors, expected " +
                                                                    std::to_string(layout.outputs.size()));
  flight.outputs.resize(result.outputs.size());
  flight.roots.resize(result.outputs.size());
  for (size_t i = 0; i < result.outputs.size(); ++i) {
    const at::Tensor& output = result.outputs[i];
    const auto position = static_cast<int64_t>(i);
    const bool is_sent = std::any_of(edges_.begin(), edges_.end(), [&](const EdgeLayout& edge) {
      return edge.from == layout.stage && std::find(edge.from_positions.begin(), edge.from_positions.end(), position) != edge.from_positions.end();
    });
    if (!is_sent) {
      continue;
    }
    flight.outputs[i] = output.detach();
    if (!step_.has_backward || !output.requires_grad()) {
      continue;
    }
    core::require(isDifferentiableOutput(layout.stage, position),
                  "value " + layout.outputs[i] + " of stage " + std::to_string(layout.stage) +
                      " requires grad, but it did not when the model was partitioned: make the engine after parameters have been frozen or unfrozen");
    flight.roots[i] = torch::autograd::impl::gradient_edge(output);
  }
  if (step_.has_backward && result.loss.has_value() && result.loss->requires_grad()) {
    flight.loss = torch::autograd::impl::gradient_edge(*result.loss);
    flight.loss_gradient = at::full_like(*result.loss, step_.loss_scale);
  }
}

/// The sum over the consumers, in the order of their stages.
std::vector<at::Tensor> StageRunner::sumGradients(int32_t stage, const Flight& flight) const {
  std::vector<at::Tensor> sums(flight.roots.size());
  for (const auto& [index, gradients] : flight.gradients) {
    const EdgeLayout& edge = edges_[static_cast<size_t>(index)];
    core::require(edge.from == stage, "a gradient came to a stage that did not make its value");
    const std::vector<size_t> chosen = edge.differentiable();
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

void StageRunner::backward(int32_t stage, int32_t microbatch) {
  Flight& flight = this->flight(stage, microbatch);
  torch::autograd::edge_list roots;
  torch::autograd::variable_list gradients;
  if (flight.loss.has_value()) {
    roots.push_back(std::move(*flight.loss));
    gradients.push_back(std::move(flight.loss_gradient));
    flight.loss.reset();
  }
  std::vector<at::Tensor> sums = sumGradients(stage, flight);
  for (size_t i = 0; i < sums.size(); ++i) {
    if (sums[i].defined() && flight.roots[i].is_valid()) {
      roots.push_back(std::move(flight.roots[i]));
      gradients.push_back(std::move(sums[i]));
    }
  }
  flight.roots.clear();
  flight.gradients.clear();
  if (!roots.empty()) {
    torch::autograd::Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true,
                                                          {});
  }
  flight.input_gradients.resize(flight.inputs.size());
  for (size_t i = 0; i < flight.inputs.size(); ++i) {
    if (const at::Tensor& leaf = flight.inputs[i]; isDifferentiableInput(stage, static_cast<int64_t>(i))) {
      flight.input_gradients[i] = leaf.grad().defined() ? leaf.grad().detach() : at::zeros_like(leaf);
      leaf.mutable_grad().reset();
    }
  }
  handOver(stage, microbatch, true);
}

/// Gives values, or gradients, to stages of this rank that need no transfer.
void StageRunner::handOver(int32_t stage, int32_t microbatch, bool is_gradient) {
  for (size_t i = 0; i < edges_.size(); ++i) {
    const auto index = static_cast<int32_t>(i);
    if (!edges_[i].is_local) {
      continue;
    }
    if (!is_gradient && edges_[i].from == stage) {
      putValues(index, microbatch, takeValues(index, microbatch));
    } else if (is_gradient && edges_[i].to == stage) {
      putGradients(index, microbatch, takeGradients(index, microbatch));
    }
  }
}

void StageRunner::release(const core::Action& action) {
  if (action.kind == core::ActionKind::kForward && step_.has_backward) {
    flight(action.stage, action.microbatch).outputs.clear();
  } else {
    flights_.erase({action.stage, action.microbatch});
  }
}

void StageRunner::putValues(int32_t edge, int32_t microbatch, const std::vector<at::Tensor>& values) {
  const EdgeLayout& layout = edges_.at(static_cast<size_t>(edge));
  Flight& flight = this->flight(layout.to, microbatch);
  flight.inputs.resize(layoutOf(layout.to).inputs.size());
  for (size_t i = 0; i < values.size(); ++i) {
    at::Tensor leaf = values[i].detach();
    if (step_.has_backward && layout.is_differentiable[i] != 0) {
      leaf.requires_grad_();
    }
    flight.inputs[static_cast<size_t>(layout.to_positions[i])] = std::move(leaf);
  }
}

std::vector<at::Tensor> StageRunner::takeValues(int32_t edge, int32_t microbatch) {
  const EdgeLayout& layout = edges_.at(static_cast<size_t>(edge));
  Flight& flight = this->flight(layout.from, microbatch);
  std::vector<at::Tensor> out;
  for (const int64_t position : layout.from_positions) {
    out.push_back(flight.outputs.at(static_cast<size_t>(position)));
  }
  return out;
}

void StageRunner::putGradients(int32_t edge, int32_t microbatch, std::vector<at::Tensor> gradients) {
  flight(edges_.at(static_cast<size_t>(edge)).from, microbatch).gradients[edge] = std::move(gradients);
}

std::vector<at::Tensor> StageRunner::takeGradients(int32_t edge, int32_t microbatch) {
  const EdgeLayout& layout = edges_.at(static_cast<size_t>(edge));
  Flight& flight = this->flight(layout.to, microbatch);
  std::vector<at::Tensor> out;
  for (const size_t i : layout.differentiable()) {
    out.push_back(flight.input_gradients.at(static_cast<size_t>(layout.to_positions[i])));
  }
  return out;
}

}  // namespace xmesh::c10d_backend
