#include "pipeline/autograd/separated_path.h"

#include <utility>

#include "pipeline/autograd/node_kinds.h"

namespace xmesh::pipeline {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

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

void setEdge(Node& node, size_t index, const Edge& edge) {
  node.next_edges()[index] = edge;
  Node* inner = innerNode(node);
  if (inner != nullptr && index > 0) {  // all but the first, which is the base's, are the inner node's too
    inner->next_edges()[index] = edge;
  }
}

}  // namespace

SeparatedPath::SeparatedPath(const PathToInputs& path, const edge_list& inputs) : path_(path), inputs_(inputs) {
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

Edge SeparatedPath::along(const Edge& edge) const {
  const auto found = stand_ins_.find(edge.function.get());
  return found == stand_ins_.end() ? edge : Edge(found->second, edge.input_nr);
}

variable_list SeparatedPath::inputGradients() const {
  variable_list out;
  for (const Edge& input : inputs_) {
    const HeldGradients& held = heldOf(stand_ins_.find(input.function.get())->second);
    out.push_back(held.has_run ? held.gradients.at(input.input_nr) : at::Tensor());
  }
  return out;
}

std::vector<NodePtr> SeparatedPath::finish() {
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

void SeparatedPath::undo() {
  for (const Changed& changed : changed_) {
    setEdge(*changed.node, changed.index, changed.edge);
  }
}

void SeparatedPath::change(Node& node, size_t index, Edge edge) {
  changed_.push_back({&node, index, node.next_edge(index)});
  setEdge(node, index, edge);
}

void SeparatedPath::separate(Node& node) {
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

void SeparatedPath::separateEarly(Node& node, const NodePtr& stand_in) {
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

}  // namespace xmesh::pipeline
