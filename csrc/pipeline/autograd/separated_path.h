#pragma once

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <vector>

#include "pipeline/autograd/held_gradients.h"
#include "pipeline/autograd/path_to_inputs.h"

namespace xmesh::pipeline {

/// The path as a graph of its own, for the first backward: stand-ins (`HeldGradients`) for the inputs, for early cuts, and at the edges that leave
/// it. Whoever makes one calls finish() once that backward has run, or undo() if it failed. Path and inputs must outlive it.
class SeparatedPath {
 public:
  SeparatedPath(const PathToInputs& path, const torch::autograd::edge_list& inputs);

  /// The edge as the first backward takes it.
  torch::autograd::Edge along(const torch::autograd::Edge& edge) const;
  /// By input; undefined where no gradient has come.
  torch::autograd::variable_list inputGradients() const;
  /// Where the second backward begins: what the cuts hold leads to weights only. The stand-ins stay behind, and refuse any other backward. A cut that
  /// no gradient has come to stays out.
  std::vector<NodePtr> finish();
  /// The graph as it was, as far as the failed backward has left it.
  void undo();

 private:
  struct Cut {
    NodePtr held;
    torch::autograd::edge_list next;  ///< late: where what it holds goes on; early: the node's edges in the second backward
  };
  struct Changed {
    torch::autograd::Node* node = nullptr;
    size_t index = 0;
    torch::autograd::Edge edge;  ///< before
  };

  void change(torch::autograd::Node& node, size_t index, torch::autograd::Edge edge);
  void separate(torch::autograd::Node& node);
  void separateEarly(torch::autograd::Node& node, const NodePtr& stand_in);

  const PathToInputs& path_;
  const torch::autograd::edge_list& inputs_;
  ska::flat_hash_map<torch::autograd::Node*, NodePtr> stand_ins_;  ///< by node: those of inputs and of early cuts
  std::vector<Cut> cuts_;
  std::vector<Changed> changed_;
};

}  // namespace xmesh::pipeline
