#include "pipeline/autograd/split_backward.h"

#include <ATen/ops/zeros.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

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

/// What sets off a HeldGradients; its value means nothing.
const at::Tensor& trigger() {
  static const at::Tensor made = at::zeros({});
  return made;
}

HeldGradients& heldOf(const NodePtr& node) { return static_cast<HeldGradients&>(*node); }

void addMetadata(Node& node, const torch::autograd::InputMetadata& metadata) {
  if (metadata.was_default_constructed()) {
    node.add_input_metadata(Node::undefined_input{});
    return;
  }
  node.add_input_metadata(metadata.options(), metadata.shape_as_dim_vector(), metadata.is_tensor_subclass(), metadata.is_nested_tensor(),
                          metadata.grad_dtype());
}

/// A stand-in with the node's inputs.
NodePtr standInFor(const Node& node) {
  NodePtr made = makeNode<HeldGradients>(node.sequence_nr());
  for (uint32_t i = 0; i < node.num_inputs(); ++i) {
    addMetadata(*made, node.input_metadata(i));
  }
  return made;
}

bool isEarly(Node& node) { return kindOf(node) == NodeKind::kEarly && !hasHooks(node) && !hasSavedTensorHooks(node); }

/// The path as a graph of its own. Whoever makes one calls finish() once the first backward has run, or undo() if it failed.
class SeparatedPath {
 public:
  SeparatedPath(const PathToInputs& path, const edge_list& inputs) : path_(path), inputs_(inputs) {
    for (const Edge& input : inputs) {
      NodePtr& stand_in = stand_ins_[input.function.get()];
      if (!stand_in) {
        stand_in = standInFor(*input.function);
        heldOf(stand_in).hooked = input.function;
      }
    }
    for (const PathToInputs::Visit& visit : path.visits()) {
      if (visit.is_on_path && visit.has_edges_off_path && isEarly(*visit.node)) {
        NodePtr made = standInFor(*visit.node);
        heldOf(made).runs = ownerOf(*visit.node);
        stand_ins_.emplace(visit.node, std::move(made));
      }
    }
    for (const PathToInputs::Visit& visit : path.visits()) {
      if (visit.is_on_path) {
        separate(*visit.node);
      }
    }
  }

  /// The edge as the first backward takes it.
  Edge along(const Edge& edge) const {
    const auto found = stand_ins_.find(edge.function.get());
    return found == stand_ins_.end() ? edge : Edge(found->second, edge.input_nr);
  }

  variable_list inputGradients() const {
    variable_list out;
    for (const Edge& input : inputs_) {
      const HeldGradients& held = heldOf(stand_ins_.find(input.function.get())->second);
      out.push_back(held.has_run ? held.gradients.at(input.input_nr) : at::Tensor());
    }
    return out;
  }

  /// Where the second backward begins: what the cuts hold leads to weights only. The stand-ins stay behind, and refuse any other backward. A cut that
  /// no gradient has come to stays out.
  std::vector<NodePtr> finish() {
    std::vector<NodePtr> out;
    for (Cut& cut : cuts_) {
      HeldGradients& held = heldOf(cut.held);
      if (!held.has_run) {
        continue;
      }
      if (held.runs) {
        held.runs->next_edges() = std::move(cut.next);
        cut.next.clear();
        for (uint32_t i = 0; i < held.runs->num_inputs(); ++i) {
          cut.next.emplace_back(held.runs, i);
        }
        held.runs = {};
      }
      NodePtr& later = out.emplace_back(makeNode<HeldGradients>(held.sequence_nr(), std::move(cut.next)));
      heldOf(later).role = HeldGradients::Role::kGives;
      heldOf(later).gradients = std::move(held.gradients);
    }
    return out;
  }

  /// The graph as it was, as far as the failed backward has left it.
  void undo() {
    for (const Changed& changed : changed_) {
      setEdge(*changed.node, changed.index, changed.edge);
    }
  }

 private:
  struct Cut {
    NodePtr held;
    edge_list next;  ///< late: where what it holds goes on; early: the node's edges in the second backward
  };
  struct Changed {
    Node* node = nullptr;
    size_t index = 0;
    Edge edge;  ///< before
  };

  static void setEdge(Node& node, size_t index, const Edge& edge) {
    node.next_edges()[index] = edge;
    Node* inner = innerNode(node);
    if (inner != nullptr && index > 0) {  // all but the first, which is the base's, are the inner node's too
      inner->next_edges()[index] = edge;
    }
  }

  void change(Node& node, size_t index, Edge edge) {
    changed_.push_back({&node, index, node.next_edge(index)});
    setEdge(node, index, edge);
  }

  void separate(Node& node) {
    const auto stand_in = stand_ins_.find(&node);
    if (stand_in != stand_ins_.end() && heldOf(stand_in->second).runs) {
      return separateEarly(node, stand_in->second);
    }
    Cut cut;
    for (size_t i = 0; i < node.next_edges().size(); ++i) {
      const Edge edge = node.next_edge(i);
      if (!edge.is_valid()) {
        continue;
      }
      if (path_.contains(edge)) {
        Edge there = along(edge);
        if (there.function != edge.function) {
          change(node, i, std::move(there));
        }
        continue;
      }
      if (!cut.held) {
        cut.held = makeNode<HeldGradients>(node.sequence_nr());
      }
      addMetadata(*cut.held, edge.function->input_metadata(edge.input_nr));
      change(node, i, Edge(cut.held, static_cast<uint32_t>(cut.next.size())));
      cut.next.push_back(edge);
    }
    if (cut.held) {
      cuts_.push_back(std::move(cut));
    }
  }

  void separateEarly(Node& node, const NodePtr& stand_in) {
    Cut cut{stand_in, node.next_edges()};
    edge_list along_path(node.next_edges().size());
    for (size_t i = 0; i < along_path.size(); ++i) {
      const Edge edge = node.next_edge(i);
      if (edge.is_valid() && path_.contains(edge)) {
        along_path[i] = along(edge);
        cut.next[i] = Edge();
      } else if (edge.is_valid()) {
        change(node, i, Edge());
      }
    }
    stand_in->next_edges() = std::move(along_path);
    cuts_.push_back(std::move(cut));
  }

  const PathToInputs& path_;
  const edge_list& inputs_;
  ska::flat_hash_map<Node*, NodePtr> stand_ins_;  ///< of inputs' nodes and early cuts
  std::vector<Cut> cuts_;
  std::vector<Changed> changed_;
};

/// Whether weights are computed from others, below an edge that leaves the path, by nodes that save tensors behind hooks, or may.
bool unpacksAgain(const PathToInputs& path, const Edge& edge, std::unordered_set<Node*>& seen) {
  std::vector<Node*> stack = {edge.function.get()};
  while (!stack.empty()) {
    Node* node = stack.back();
    stack.pop_back();
    if (!seen.insert(node).second) {
      continue;
    }
    if (kindOf(*node) == NodeKind::kEarly ? hasSavedTensorHooks(*node) : !savesNothing(*node)) {
      return true;
    }
    for (const Edge& next : node->next_edges()) {
      if (next.is_valid() && !path.contains(next)) {
        stack.push_back(next.function.get());
      }
    }
  }
  return false;
}

std::string whyCutFails(const PathToInputs& path, Node& node, bool has_saved_hooks, std::unordered_set<Node*>& seen) {
  for (const Edge& edge : node.next_edges()) {
    if (!edge.is_valid() || path.contains(edge)) {
      continue;
    }
    if (edge.function->input_metadata(edge.input_nr).is_cpp_nested_tensor()) {
      return node.name() + " makes the gradient of a nested tensor";
    }
    if (has_saved_hooks && unpacksAgain(path, edge, seen)) {
      return "a checkpoint, or other saved-tensor hooks, would unpack what " + edge.function->name() +
             " computes weights from once more for their gradients";
    }
  }
  return {};
}

std::string whyWhole(const PathToInputs& path) {
  bool has_saved_hooks = false;
  for (const PathToInputs::Visit& visit : path.visits()) {
    has_saved_hooks = has_saved_hooks || (visit.is_on_path && hasSavedTensorHooks(*visit.node));
  }
  std::unordered_set<Node*> seen;
  for (const PathToInputs::Visit& visit : path.visits()) {
    if (!visit.is_on_path) {
      continue;
    }
    std::string reason = whyNotSplit(*visit.node);
    if (reason.empty() && visit.has_edges_off_path) {
      reason = whyCutFails(path, *visit.node, has_saved_hooks, seen);
    }
    if (!reason.empty()) {
      return reason;
    }
  }
  return {};
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

int64_t WeightBackward::heldBytes() const {
  std::unordered_map<const void*, int64_t> sizes;
  const auto add = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.has_storage()) {
      sizes[tensor.storage().unsafeGetStorageImpl()] = static_cast<int64_t>(tensor.storage().nbytes());
    }
  };
  for (const Edge& root : roots_) {
    if (const auto* held = dynamic_cast<const HeldGradients*>(root.function.get())) {
      std::for_each(held->gradients.begin(), held->gradients.end(), add);
      for (const Edge& next : held->next_edges()) {
        for (const at::Tensor& saved : savedTensors(*next.function)) {
          const bool is_weight = saved.is_view() ? saved._base().is_leaf() && saved._base().requires_grad()
                                                 : saved.is_leaf() && saved.grad_fn() == nullptr && saved.requires_grad();
          if (!is_weight) {
            add(saved);
          }
        }
      }
    }
  }
  int64_t sum = 0;
  for (const auto& [storage, num_bytes] : sizes) {
    sum += num_bytes;
  }
  return sum;
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
    for (const NodePtr& node : held) {
      later_roots.emplace_back(node, node->add_input_metadata(trigger()));
      later_gradients.push_back(trigger());
    }
  }
  out.weights = {std::move(later_roots), std::move(later_gradients)};
  return out;
}

}  // namespace xmesh::pipeline
