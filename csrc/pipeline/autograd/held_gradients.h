#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <stdexcept>
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

/// Stands where a split backward leaves the path: the first backward ends here, or goes through, and the second goes on from here. It has the
/// sequence number of the node it stands beside, so that both run in the order of a whole backward and add up in the same order.
struct HeldGradients final : torch::autograd::Node {
  using Node::Node;

  enum class Role : uint8_t {
    kHolds,  ///< in the first backward: keeps what comes
    kGives,  ///< in the second: passes that on to its next edges, in order; what comes only sets it off
  };

  Role role = Role::kHolds;
  bool has_run = false;                      ///< gradients have come, though some may be undefined
  torch::autograd::variable_list gradients;  ///< by input
  /// At an early cut, the node that stands there: what it computes along the path is passed on in the first backward. Else null.
  NodePtr runs;
  /// At an input, the node whose hooks on the gradient run first. Else null.
  NodePtr hooked;

  torch::autograd::variable_list apply(torch::autograd::variable_list&& inputs) override {
    if (role == Role::kGives) {
      return std::move(gradients);
    }
    if (has_run) {
      throw std::runtime_error("this graph belongs to a split backward, which has run: no other backward can go through it");
    }
    has_run = true;
    if (hooked) {
      for (const auto& hook : hooked->tensor_pre_hooks()) {
        inputs = (*hook)(inputs);
      }
      for (const auto& hook : hooked->retains_grad_hooks()) {
        inputs = (*hook.second)(inputs);
      }
    }
    gradients = inputs;
    return runs ? (*runs)(std::move(inputs)) : torch::autograd::variable_list();
  }
  std::string name() const override { return "xmesh::HeldGradients"; }
};

inline HeldGradients& heldOf(const NodePtr& node) { return static_cast<HeldGradients&>(*node); }

}  // namespace xmesh::pipeline
