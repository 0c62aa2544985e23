#include "pipeline/flights.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "core/error.h"

namespace xmesh::pipeline {
namespace {

/// A leaf that stands for a value in the middle of the model. Autocast keeps the casts of leaves, which it takes for weights, unless they are views:
/// of a kept cast that several layers read, the gradients would be added in the cast's type, not in the value's.
at::Tensor asLeaf(const at::Tensor& value) {
  const at::NoGradGuard no_grad;
  return value.view_as(value).requires_grad_();
}

/// Hands a gradient on.
struct PassedValue final : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override { return std::move(gradients); }
  std::string name() const override { return "PassedValue"; }
};

/// A leaf of no memory, and the value as what is computed from that: whoever holds the leaf does not hold the value.
std::pair<at::Tensor, at::Tensor> behindLeaf(const at::Tensor& value) {
  const at::NoGradGuard no_grad;
  const at::Tensor leaf = at::zeros({}, value.options()).expand(value.sizes()).requires_grad_();
  const std::shared_ptr<PassedValue> node(new PassedValue(), torch::autograd::deleteNode);
  node->set_next_edges({torch::autograd::impl::gradient_edge(leaf)});
  at::Tensor out = value.detach();
  torch::autograd::set_history(out, node);
  return {leaf, out};
}

}  // namespace

std::vector<size_t> EdgeValues::differentiable() const {
  std::vector<size_t> out;
  for (size_t i = 0; i < is_differentiable.size(); ++i) {
    if (is_differentiable[i] != 0) {
      out.push_back(i);
    }
  }
  return out;
}

Flights::Flights(std::vector<StageValues> stages, std::vector<EdgeValues> edges) : edges_(std::move(edges)) {
  for (StageValues& values : stages) {
    const int32_t index = values.stage;
    Stage& stage = stages_[index];
    stage.values = std::move(values);
    stage.inputs.resize(stage.values.inputs.size());
    stage.outputs.resize(stage.values.outputs.size());
    for (const EdgeValues& edge : edges_) {
      for (size_t i = 0; i < edge.is_differentiable.size(); ++i) {
        const bool is_differentiable = edge.is_differentiable[i] != 0;
        if (edge.from == index) {
          ValueUse& output = stage.outputs.at(static_cast<size_t>(edge.from_positions.at(i)));
          output = {true, output.is_differentiable || is_differentiable};
        }
        if (edge.to == index) {
          stage.inputs.at(static_cast<size_t>(edge.to_positions.at(i))) = {true, is_differentiable};
        }
      }
    }
  }
  for (const EdgeValues& edge : edges_) {
    differentiable_.push_back(edge.differentiable());
  }
}

std::vector<int32_t> Flights::stages() const {
  std::vector<int32_t> out;
  for (const auto& [number, stage] : stages_) {
    out.push_back(number);
  }
  return out;
}

void Flights::begin(bool has_backward) {
  flights_.clear();
  has_backward_ = has_backward;
}

void Flights::putValues(int32_t edge, int32_t microbatch, std::vector<at::Tensor> values) {
  const EdgeValues& edge_values = edges_.at(static_cast<size_t>(edge));
  Flight& flight = at(edge_values.to, microbatch);
  flight.inputs.resize(stage(edge_values.to).inputs.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const bool is_leaf = has_backward_ && edge_values.is_differentiable[i] != 0;
    const auto position = static_cast<size_t>(edge_values.to_positions[i]);
    if (is_leaf && edge_values.is_passing) {
      flight.leaves.resize(flight.inputs.size());
      std::tie(flight.leaves[position], flight.inputs[position]) = behindLeaf(values[i]);
    } else {
      flight.inputs[position] = is_leaf ? asLeaf(values[i]) : std::move(values[i]);
    }
  }
}

std::vector<at::Tensor> Flights::takeValues(int32_t edge, int32_t microbatch) {
  const EdgeValues& edge_values = edges_.at(static_cast<size_t>(edge));
  const Flight& flight = at(edge_values.from, microbatch);
  std::vector<at::Tensor> out;
  for (const int64_t position : edge_values.from_positions) {
    out.push_back(flight.outputs.at(static_cast<size_t>(position)));
  }
  return out;
}

void Flights::putGradients(int32_t edge, int32_t microbatch, std::vector<at::Tensor> gradients) {
  at(edges_.at(static_cast<size_t>(edge)).from, microbatch).gradients[edge] = std::move(gradients);
}

std::vector<at::Tensor> Flights::takeGradients(int32_t edge, int32_t microbatch) {
  const EdgeValues& edge_values = edges_.at(static_cast<size_t>(edge));
  const Flight& flight = at(edge_values.to, microbatch);
  std::vector<at::Tensor> out;
  for (const size_t i : differentiable(edge)) {
    out.push_back(flight.input_gradients.at(static_cast<size_t>(edge_values.to_positions[i])));
  }
  return out;
}

std::vector<at::Tensor> Flights::sumOfGradients(int32_t stage, int32_t microbatch) {
  const Flight& flight = at(stage, microbatch);
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

void Flights::handOver(int32_t stage, int32_t microbatch, bool is_gradient) {
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

void Flights::keepLeaves(int32_t stage, int32_t microbatch) {
  Flight& flight = at(stage, microbatch);
  for (size_t i = 0; i < flight.leaves.size(); ++i) {
    if (flight.leaves[i].defined()) {
      flight.inputs[i] = std::move(flight.leaves[i]);
    }
  }
  flight.leaves.clear();
}

void Flights::release(const core::Action& action) {
  switch (core::flightChangeOf(action.kind)) {
    case core::FlightChange::kBegins:
      if (has_backward_) {
        at(action.stage, action.microbatch).outputs.clear();
        return;
      }
      break;
    case core::FlightChange::kGoesOn:
      at(action.stage, action.microbatch).input_gradients.clear();
      return;
    case core::FlightChange::kEnds:
      break;
  }
  flights_.erase({action.stage, action.microbatch});
}

}  // namespace xmesh::pipeline
