#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace xmesh::pipeline {

/// Owns a node of the graph: what an Edge holds, shared_ptr or intrusive_ptr by the version of torch.
using NodePtr = decltype(torch::autograd::Edge::function);

template <class T, class... Arguments>
NodePtr makeNode(Arguments&&... arguments) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    return NodePtr(new T(std::forward<Arguments>(arguments)...), [](T* node) { deleteNode(node); });
  } else {
    return NodePtr(c10::make_intrusive<T>(std::forward<Arguments>(arguments)...));
  }
}

/// One more owner of a node that has one.
template <class AnyNode>
NodePtr ownerOf(AnyNode& node) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<AnyNode>>) {
    return node.getptr();
  } else {
    return c10::intrusive_ptr<AnyNode>::unsafe_reclaim_from_nonowning(&node);
  }
}

/// A node that a backward can end at and a later one goes on from. Gradients come in by its inputs and are captured there; once they are given back
/// (`gradients`) and it has next edges, running it by its trigger, its last input, passes them on in order. It has the sequence number of the
/// node it stands beside, so that the later backward runs in the order of a whole one and adds up in the same order.
struct HeldGradients final : torch::autograd::Node {
  using Node::Node;

  torch::autograd::variable_list gradients;

  torch::autograd::variable_list apply(torch::autograd::variable_list&& /*inputs*/) override { return std::move(gradients); }
  std::string name() const override { return "xmesh::HeldGradients"; }
};

}  // namespace xmesh::pipeline
