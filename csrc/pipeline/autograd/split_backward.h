#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace xmesh::pipeline {

/// What a backward of input gradients has left: the weights' part. Owns what of the graph that needs. Threading: one thread at a time, without the
/// GIL, any thread; the graph itself must be left alone by everyone else.
class WeightBackward {
 public:
  WeightBackward() = default;
  WeightBackward(torch::autograd::edge_list roots, torch::autograd::variable_list gradients)
      : roots_(std::move(roots)), gradients_(std::move(gradients)) {}

  /// Adds to the `.grad` of every leaf that the outputs depend on past the inputs, hooks included, what one whole backward would have added. Once.
  void run();
  /// The memory that waits for run(), bytes by storage: of gradients, and of what early cuts saved, weights among it.
  std::map<const void*, int64_t> heldStorages() const;

 private:
  torch::autograd::edge_list roots_;
  torch::autograd::variable_list gradients_;
};

struct InputBackward {
  torch::autograd::variable_list gradients;  ///< by input; undefined where no output depends on it
  WeightBackward weights;
  /// Not empty: the graph cannot be split for this reason, and the whole backward has run: the weights' part has nothing left to do.
  std::string whole_because;
};

/// The gradients of `inputs` now, those of everything else later: backward of roots (valid edges) with their gradients (defined, kept by the caller
/// until the weights' part has run if their memory is used again). The inputs end the backward: what they were made from gets nothing. The graph is
/// altered and in part released; nothing else may run backward through it, before or after.
///
/// Zero bubble pipelines (Qi et al., 2023, section 2) split a backward so. Here, node by node of the eager graph between roots and inputs
/// (`PathToInputs`): for the first backward the path is made a graph of its own (`SeparatedPath`), whose exits are `HeldGradients`. One stands for
/// each input. Where an edge leaves the path towards weights, there is a cut:
/// - early (products without hooks): the node runs now for its input gradients, behind a stand-in that keeps what comes in, and once more in the
/// second
///   half for the rest. Each time it has only the edges that it is to compute for, so that nothing is computed twice.
/// - late (all else): the node runs once, now; its gradient of the weight is held.
///
/// Roots off the path belong to the second half altogether. Every other node on the path releases what it saved as soon as it has run.
///
/// `whole_because`: why a backward that reaches an input has to be whole, whatever the graph is; empty where the graph decides.
///
/// Throws InvalidArgument for inputs that depend on one another, and where the backward has to be whole for inputs that are no leaves.
InputBackward backwardInputs(torch::autograd::edge_list roots, torch::autograd::variable_list gradients, const std::vector<at::Tensor>& inputs,
                             const std::string& whole_because = {});

}  // namespace xmesh::pipeline
