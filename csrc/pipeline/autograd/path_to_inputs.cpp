#include "pipeline/autograd/path_to_inputs.h"

#include <algorithm>

namespace xmesh::pipeline {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;

PathToInputs::PathToInputs(const edge_list& inputs) : inputs_(inputs) {
  for (const Edge& edge : inputs_) {
    input_nodes_.insert(edge.function.get());
  }
}

bool PathToInputs::isInput(const Edge& edge) const {
  return input_nodes_.find(edge.function.get()) != input_nodes_.end() && std::find(inputs_.begin(), inputs_.end(), edge) != inputs_.end();
}

bool PathToInputs::contains(const Edge& edge) const {
  const auto found = index_.find(edge.function.get());
  return (found != index_.end() && visits_[found->second].is_on_path) || isInput(edge);
}

std::pair<uint32_t, bool> PathToInputs::visitOf(Node* node) {
  const auto [place, is_new] = index_.emplace(node, static_cast<uint32_t>(visits_.size()));
  if (is_new) {
    visits_.push_back({node});
  }
  return {place->second, is_new};
}

void PathToInputs::visit(const Edge& root) {
  if (!root.is_valid() || isInput(root)) {
    return;
  }
  const auto [first, is_new] = visitOf(root.function.get());
  if (!is_new) {
    return;
  }
  stack_.push_back(first);
  while (!stack_.empty()) {
    const uint32_t index = stack_.back();
    const edge_list& edges = visits_[index].node->next_edges();
    bool goes_down = false;
    while (!goes_down && visits_[index].next_edge < edges.size()) {
      const Edge& edge = edges[visits_[index].next_edge];
      bool is_on_path = false;
      if (edge.is_valid()) {
        is_on_path = isInput(edge);
        if (!is_on_path) {
          const auto [child, is_new_child] = visitOf(edge.function.get());
          if (is_new_child) {
            stack_.push_back(child);
            goes_down = true;  // and looks at this edge once more
            continue;
          }
          is_on_path = visits_[child].is_on_path;
        }
        visits_[index].is_on_path |= is_on_path;
        visits_[index].has_edges_off_path |= !is_on_path;
      }
      ++visits_[index].next_edge;
    }
    if (!goes_down) {
      stack_.pop_back();
    }
  }
}

}  // namespace xmesh::pipeline
