#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "core/pipeline/action.h"
#include "pipeline/autograd/split_backward.h"
#include "pipeline/edge_values.h"

namespace xmesh::pipeline {

/// What becomes of one output of a stage, or was of one input.
struct ValueUse {
  bool crosses = false;  ///< some edge has it
  bool is_differentiable = false;
};

/// One microbatch on one stage: what it holds between its actions.
struct Flight {
  std::vector<at::Tensor> inputs;            ///< by input position; differentiable ones are leaves, or behind `leaves`
  std::vector<at::Tensor> leaves;            ///< by input position, without memory; undefined where the input is its own
  std::vector<at::Tensor> outputs;           ///< by output position, detached; until they are sent
  std::vector<torch::autograd::Edge> roots;  ///< by output position; invalid where no gradient can enter
  std::optional<torch::autograd::Edge> loss;
  at::Tensor loss_gradient;
  std::map<int32_t, std::vector<at::Tensor>> gradients;  ///< by edge out of the stage
  std::vector<at::Tensor> input_gradients;               ///< by input position; after backward
  WeightBackward weights;                                ///< between I and W
};

/// The microbatches in flight on the stages of one rank: what the runner computes from and into, and what the boundary brings and fetches. An
/// output's memory goes as soon as it is sent. Threading: the engine's thread.
class Flights {
 public:
  Flights(std::vector<StageValues> stages, std::vector<EdgeValues> edges);

  const std::vector<EdgeValues>& edges() const { return edges_; }
  /// EdgeValues::differentiable() of an edge.
  const std::vector<size_t>& differentiable(int32_t edge) const { return differentiable_.at(static_cast<size_t>(edge)); }
  bool has(int32_t stage) const { return stages_.contains(stage); }
  /// Their numbers, ascending.
  std::vector<int32_t> stages() const;
  const StageValues& stage(int32_t stage) const { return stages_.at(stage).values; }
  const std::vector<ValueUse>& inputUses(int32_t stage) const { return stages_.at(stage).inputs; }
  const std::vector<ValueUse>& outputUses(int32_t stage) const { return stages_.at(stage).outputs; }

  /// Forgets all that is in flight; from now on leaves are made for a backward, or none.
  void begin(bool has_backward);
  Flight& at(int32_t stage, int32_t microbatch) { return flights_[{stage, microbatch}]; }
  /// The values of an edge for its consumer, which nobody else refers to and the microbatch holds until its backward has ended.
  void putValues(int32_t edge, int32_t microbatch, std::vector<at::Tensor> values);
  std::vector<at::Tensor> takeValues(int32_t edge, int32_t microbatch);
  /// Gradients of the differentiable values of an edge.
  void putGradients(int32_t edge, int32_t microbatch, std::vector<at::Tensor> gradients);
  std::vector<at::Tensor> takeGradients(int32_t edge, int32_t microbatch);
  /// By output position, the sum of the gradients that came over the edges of its consumers, in the order of their stages; undefined without any.
  std::vector<at::Tensor> sumOfGradients(int32_t stage, int32_t microbatch);
  /// Gives a stage's values, or the gradients of its inputs, to the stages of this rank that need no transfer.
  void handOver(int32_t stage, int32_t microbatch, bool is_gradient);
  /// A forward has run: of what only that needed nothing is held.
  void keepLeaves(int32_t stage, int32_t microbatch);
  /// An action has run, and what it made is sent: drops what nothing later needs.
  void release(const core::Action& action);

 private:
  struct Stage {
    StageValues values;
    std::vector<ValueUse> inputs;
    std::vector<ValueUse> outputs;
  };

  const std::vector<EdgeValues> edges_;
  std::vector<std::vector<size_t>> differentiable_;  ///< by edge
  std::map<int32_t, Stage> stages_;
  std::map<std::pair<int32_t, int32_t>, Flight> flights_;  ///< by stage and microbatch
  bool has_backward_ = true;
};

}  // namespace xmesh::pipeline
