#include "pipeline/autograd/why_whole.h"

#include <unordered_set>
#include <vector>

#include "pipeline/autograd/node_kinds.h"

namespace xmesh::pipeline {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;

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

}  // namespace

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

}  // namespace xmesh::pipeline
