#pragma once

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <vector>

namespace xmesh::pipeline {

/// The part of an autograd graph that lies between outputs and inputs: the nodes from which an input can be reached. What hangs off it computes
/// gradients of weights only. Linear in the graph. Keeps plain pointers: the graph must outlive it.
class PathToInputs {
 public:
  /// `inputs`: their gradient edges; the search ends there.
  explicit PathToInputs(const torch::autograd::edge_list& inputs);

  /// Adds what is below an output.
  void visit(const torch::autograd::Edge& root);
  /// Whether an input can be reached through the edge, or it is one. Of edges that have been visited.
  bool contains(const torch::autograd::Edge& edge) const;
  bool isInput(const torch::autograd::Edge& edge) const;

  struct Visit {
    torch::autograd::Node* node = nullptr;
    uint32_t next_edge = 0;  ///< to look at
    bool is_on_path = false;
    bool has_edges_off_path = false;
  };
  /// Every visited node, in no order that means anything.
  const std::vector<Visit>& visits() const { return visits_; }

 private:
  /// The node's visit, which is made if there is none.
  std::pair<uint32_t, bool> visitOf(torch::autograd::Node* node);

  const torch::autograd::edge_list inputs_;
  ska::flat_hash_map<torch::autograd::Node*, uint32_t> index_;  ///< into visits_
  ska::flat_hash_set<torch::autograd::Node*> input_nodes_;
  std::vector<Visit> visits_;
  std::vector<uint32_t> stack_;
};

}  // namespace xmesh::pipeline
