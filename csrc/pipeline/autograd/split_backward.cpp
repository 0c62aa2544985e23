#include "pipeline/autograd/split_backward.h"

#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>

#include "core/error.h"
#include "pipeline/autograd/held_gradients.h"
#include "pipeline/autograd/node_kinds.h"
#include "pipeline/autograd/path_to_inputs.h"

namespace xmesh::pipeline {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;

/// Releases what a node saved once it has run: a later use of the graph, which keeps it as a whole, has no use for it.
class ReleaseAfter final : public torch::autograd::FunctionPostHook {
 public:
  explicit ReleaseAfter(Node* node) : node_(node) {}
  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    node_->release_variables();
    return outputs;
  }

 private:
  Node* node_;  ///< owns this
};

/// What sets off a HeldGradients; its value means nothing.
const at::Tensor& trigger() {
  static const at::Tensor made = at::zeros({});
  return made;
}

/// The outlets of one cut: gradients captured in the first backward, and where the second one goes on.
struct Cut {
  NodePtr held;
  edge_list captured;           ///< where the gradients are found
  edge_list next;               ///< where they go on to, one each
  std::vector<size_t> severed;  ///< an early cut's edges along the path
};

void addMetadata(Node& node, const torch::autograd::InputMetadata& metadata) {
  if (metadata.was_default_constructed()) {
    node.add_input_metadata(Node::undefined_input{});
    return;
  }
  node.add_input_metadata(metadata.options(), metadata.shape_as_dim_vector(), metadata.is_tensor_subclass(), metadata.is_nested_tensor(),
                          metadata.grad_dtype());
}

bool isOff(const PathToInputs& path, const Edge& edge) { return edge.is_valid() && !path.contains(edge); }

/// Every gradient that comes into the node is captured, and comes into it once more later; nothing goes on along the path then.
Cut cutEarly(const PathToInputs& path, Node& node) {
  Cut cut;
  cut.held = makeNode<HeldGradients>(node.sequence_nr());
  for (uint32_t i = 0; i < node.num_inputs(); ++i) {
    cut.captured.emplace_back(ownerOf(node), i);
  }
  cut.next = cut.captured;
  for (size_t i = 0; i < node.next_edges().size(); ++i) {
    const Edge& edge = node.next_edge(i);
    if (edge.is_valid() && path.contains(edge)) {
      cut.severed.push_back(i);
    }
  }
  return cut;
}

/// The edges off the path end at a node that stands in for the weights.
Cut cutLate(const PathToInputs& path, Node& node) {
  Cut cut;
  cut.held = makeNode<HeldGradients>(node.sequence_nr());
  Node* inner = innerNode(node);
  for (size_t i = 0; i < node.next_edges().size(); ++i) {
    Edge& edge = node.next_edges()[i];
    if (isOff(path, edge)) {
      addMetadata(*cut.held, edge.function->input_metadata(edge.input_nr));
      const Edge outlet(cut.held, static_cast<uint32_t>(cut.captured.size()));
      cut.captured.push_back(outlet);
      cut.next.push_back(std::exchange(edge, outlet));
      if (inner != nullptr && i > 0) {  // all but the first, which is the base's, are the inner node's
        inner->next_edges()[i] = outlet;
      }
    }
  }
  return cut;
}

bool isEarly(Node& node) { return kindOf(node) == NodeKind::kEarly && !hasHooks(node) && !hasSavedTensorHooks(node); }

std::string whyCutFails(const PathToInputs& path, Node& node) {
  for (const Edge& edge : node.next_edges()) {
    if (isOff(path, edge) && edge.function->input_metadata(edge.input_nr).is_cpp_nested_tensor()) {
      return node.name() + " makes the gradient of a nested tensor";
    }
  }
  return {};
}

std::string whyWhole(const PathToInputs& path) {
  for (const PathToInputs::Visit& visit : path.visits()) {
    if (!visit.is_on_path) {
      continue;
    }
    std::string reason = whyNotSplit(*visit.node);
    if (reason.empty() && visit.has_edges_off_path) {
      reason = whyCutFails(path, *visit.node);
    }
    if (!reason.empty()) {
      return reason;
    }
  }
  return {};
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

/// Prepares the graph: cuts, and hooks that release.
std::vector<Cut> cutGraph(const PathToInputs& path) {
  std::vector<Cut> cuts;
  for (const PathToInputs::Visit& visit : path.visits()) {
    if (!visit.is_on_path) {
      continue;
    }
    const bool is_early = visit.has_edges_off_path && isEarly(*visit.node);
    if (visit.has_edges_off_path) {
      cuts.push_back(is_early ? cutEarly(path, *visit.node) : cutLate(path, *visit.node));
    }
    if (!is_early) {
      visit.node->will_release_variables();
      visit.node->add_post_hook(std::make_unique<ReleaseAfter>(visit.node));
    }
  }
  return cuts;
}

/// The first backward: captured gradients go to their cuts, the inputs' are returned.
variable_list runFirst(const edge_list& roots, const variable_list& gradients, edge_list wanted, const std::vector<Cut>& cuts) {
  const size_t num_inputs = wanted.size();
  for (const Cut& cut : cuts) {
    wanted.insert(wanted.end(), cut.captured.begin(), cut.captured.end());
  }
  variable_list found =
      Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/true, /*create_graph=*/false, /*accumulate_grad=*/false, wanted);
  size_t taken = num_inputs;
  for (const Cut& cut : cuts) {
    variable_list& held = static_cast<HeldGradients&>(*cut.held).gradients;
    for (size_t i = 0; i < cut.captured.size(); ++i) {
      held.push_back(std::move(found[taken++]));
    }
  }
  found.resize(num_inputs);
  return found;
}

/// After the first backward: an early cut computes nothing along the path any more, and what was held goes on from its cut.
void goOnFrom(Cut& cut) {
  for (const size_t edge : cut.severed) {
    cut.next.front().function->next_edges()[edge] = Edge();
  }
  cut.held->next_edges() = std::move(cut.next);
}

}  // namespace

void WeightBackward::run() {
  const edge_list roots = std::exchange(roots_, {});
  const variable_list gradients = std::exchange(gradients_, {});
  if (!roots.empty()) {
    Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true, {});
  }
}

InputBackward backwardInputs(edge_list roots, variable_list gradients, const std::vector<at::Tensor>& inputs) {
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
  std::string reason = whyWhole(path);
  if (!reason.empty()) {
    return wholeBackward(roots, gradients, inputs, std::move(reason));
  }
  edge_list first_roots;
  variable_list first_gradients;
  edge_list later_roots;
  variable_list later_gradients;
  for (size_t i = 0; i < roots.size(); ++i) {
    const bool is_first = path.contains(roots[i]);
    (is_first ? first_roots : later_roots).push_back(std::move(roots[i]));
    (is_first ? first_gradients : later_gradients).push_back(std::move(gradients[i]));
  }
  InputBackward out;
  out.gradients.resize(inputs.size());
  if (!first_roots.empty()) {
    std::vector<Cut> cuts = cutGraph(path);
    out.gradients = runFirst(first_roots, first_gradients, std::move(wanted), cuts);
    for (Cut& cut : cuts) {
      variable_list& held = static_cast<HeldGradients&>(*cut.held).gradients;
      if (std::any_of(held.begin(), held.end(), [](const at::Tensor& gradient) { return gradient.defined(); })) {
        later_roots.emplace_back(cut.held, cut.held->add_input_metadata(trigger()));
        later_gradients.push_back(trigger());
      }
      goOnFrom(cut);
    }
  }
  out.weights = {std::move(later_roots), std::move(later_gradients)};
  return out;
}

}  // namespace xmesh::pipeline
