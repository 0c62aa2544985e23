#include "pipeline/autograd/split_backward.h"

#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_set>

#include "core/error.h"
#include "pipeline/autograd/held_gradients.h"
#include "pipeline/autograd/node_kinds.h"
#include "pipeline/autograd/path_to_inputs.h"
#include "pipeline/autograd/separated_path.h"
#include "pipeline/autograd/why_whole.h"

namespace xmesh::pipeline {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::variable_list;

/// Where the gradients are that a HeldGradients holds.
c10::Device deviceOf(const HeldGradients& held) {
  const auto on_device =
      std::find_if(held.gradients.begin(), held.gradients.end(), [](const at::Tensor& one) { return one.defined() && !one.is_cpu(); });
  return on_device == held.gradients.end() ? c10::Device(c10::kCPU) : on_device->device();
}

/// What sets off HeldGradients on a device; its value means nothing, but anomaly mode looks at it. Autograd runs a node on the thread of its inputs'
/// device, and only nodes of one thread run in the order of a whole backward.
at::Tensor triggerOn(c10::Device device) {
  static const at::Tensor on_host = at::zeros({});  // held until W runs: so it is no memory of the step's
  return device.is_cpu() ? on_host : at::zeros({}, at::TensorOptions().device(device));
}

/// A whole backward gives inputs gradients of their own memory, since it accumulates them: so here, where one shares it with what weights still wait
/// for, with what was given, or with another input's.
void giveOwnMemory(variable_list& found, const std::vector<NodePtr>& held, const variable_list& given) {
  std::unordered_set<const void*> taken;
  bool has_subclasses = false;
  const auto take = [&](const at::Tensor& tensor) {
    if (tensor.defined()) {
      has_subclasses = has_subclasses || tensor.key_set().has(c10::DispatchKey::Python);  // what it wraps cannot be seen
      if (tensor.has_storage()) {
        taken.insert(tensor.storage().unsafeGetStorageImpl());
      }
    }
  };
  for (const NodePtr& node : held) {
    for (const at::Tensor& gradient : heldOf(node).gradients) {
      take(gradient);
    }
  }
  for (const at::Tensor& gradient : given) {
    take(gradient);
  }
  for (at::Tensor& gradient : found) {
    if (gradient.defined() && gradient.has_storage() && (has_subclasses || taken.count(gradient.storage().unsafeGetStorageImpl()) > 0)) {
      gradient = gradient.clone();
    }
    take(gradient);
  }
}

/// Throws where one input's gradient would have to come through another.
void checkIndependent(const edge_list& edges, const std::vector<at::Tensor>& inputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      core::require(!(edges[i] == edges[j]), "inputs[" + std::to_string(i) + "] is inputs[" + std::to_string(j) + "] again");
    }
  }
  if (inputs.size() < 2) {
    return;
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].is_leaf()) {
      continue;
    }
    PathToInputs below(edges);
    for (const Edge& edge : edges[i].function->next_edges()) {
      below.visit(edge);
      core::require(!edge.is_valid() || !below.contains(edge),
                    "inputs[" + std::to_string(i) + "] is computed from another of the inputs: pass it through detach().requires_grad_() first");
    }
  }
}

InputBackward wholeBackward(const edge_list& roots, const variable_list& gradients, const std::vector<at::Tensor>& inputs, std::string reason) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    core::require(inputs[i].is_leaf(), "the backward cannot be split, since " + reason + "; a whole one needs inputs that are leaves, but inputs[" +
                                           std::to_string(i) + "] is not: pass it through detach().requires_grad_() first");
  }
  InputBackward out;
  out.whole_because = std::move(reason);
  variable_list before;
  for (const at::Tensor& input : inputs) {
    before.push_back(std::exchange(input.mutable_grad(), {}));
  }
  const auto giveBack = [&] {
    for (size_t i = 0; i < inputs.size(); ++i) {
      out.gradients.push_back(std::exchange(inputs[i].mutable_grad(), std::move(before[i])));
    }
  };
  try {
    if (!roots.empty()) {
      Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true, {});
    }
  } catch (...) {
    giveBack();
    throw;
  }
  giveBack();
  return out;
}

}  // namespace

void WeightBackward::run() {
  const edge_list roots = std::exchange(roots_, {});
  const variable_list gradients = std::exchange(gradients_, {});
  if (!roots.empty()) {
    Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true, {});
  }
}

std::map<const void*, int64_t> WeightBackward::heldStorages() const {
  std::map<const void*, int64_t> out;
  const auto add = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.has_storage()) {
      out[tensor.storage().unsafeGetStorageImpl()] = static_cast<int64_t>(tensor.storage().nbytes());
    }
  };
  for (const Edge& root : roots_) {
    if (const auto* held = dynamic_cast<const HeldGradients*>(root.function.get())) {
      std::for_each(held->gradients.begin(), held->gradients.end(), add);
      for (const Edge& next : held->next_edges()) {
        const std::vector<at::Tensor> saved = savedTensors(*next.function);
        std::for_each(saved.begin(), saved.end(), add);
      }
    }
  }
  return out;
}

InputBackward backwardInputs(edge_list roots, variable_list gradients, const std::vector<at::Tensor>& inputs, const std::string& whole_because) {
  edge_list wanted;
  wanted.reserve(inputs.size());
  for (const at::Tensor& input : inputs) {
    wanted.push_back(torch::autograd::impl::gradient_edge(input));
  }
  checkIndependent(wanted, inputs);
  PathToInputs path(wanted);
  for (const Edge& root : roots) {
    path.visit(root);
  }
  std::string reason = inputs.empty() || whole_because.empty() ? whyWhole(path) : whole_because;
  if (!reason.empty()) {
    return wholeBackward(roots, gradients, inputs, std::move(reason));
  }
  InputBackward out;
  out.gradients.resize(inputs.size());
  edge_list first_roots;
  variable_list first_gradients;
  edge_list later_roots;
  variable_list later_gradients;
  for (size_t i = 0; i < roots.size(); ++i) {
    const bool is_first = path.contains(roots[i]);
    (is_first ? first_roots : later_roots).push_back(roots[i]);
    (is_first ? first_gradients : later_gradients).push_back(gradients[i]);
  }
  if (!first_roots.empty()) {
    SeparatedPath separated(path, wanted);
    for (Edge& root : first_roots) {
      root = separated.along(root);
    }
    try {
      Engine::get_default_engine().execute(first_roots, first_gradients, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true, {});
    } catch (...) {
      separated.undo();
      throw;
    }
    out.gradients = separated.inputGradients();
    const std::vector<NodePtr> held = separated.finish();
    giveOwnMemory(out.gradients, held, gradients);
    at::Tensor trigger;
    for (const NodePtr& node : held) {
      if (const c10::Device device = deviceOf(heldOf(node)); !trigger.defined() || trigger.device() != device) {
        trigger = triggerOn(device);
      }
      later_roots.emplace_back(node, node->add_input_metadata(trigger));
      later_gradients.push_back(trigger);
    }
  }
  out.weights = {std::move(later_roots), std::move(later_gradients)};
  return out;
}

}  // namespace xmesh::pipeline
