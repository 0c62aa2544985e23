#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/autograd/split_backward.h"
#include "runtime/engine.h"

namespace xmesh::pipeline {

/// The values that go from one stage to a later one, by their positions among the outputs of the one and the inputs of the other.
struct EdgeValues {
  int32_t from = 0;
  int32_t to = 0;
  std::vector<int64_t> from_positions;
  std::vector<int64_t> to_positions;
  std::vector<at::ScalarType> dtypes;
  std::vector<uint8_t> is_differentiable;
  /// The producer ignores the gradient on this rank: another rank of its mesh, whose copy of the value is as good, takes it for all.
  std::vector<uint8_t> drops_gradient;
  bool is_local = false;      ///< both stages are on this rank and the values need not move
  bool has_producer = false;  ///< `from` is on this rank
  bool has_consumer = false;  ///< `to` is on this rank

  /// Positions in the lists above of those that have a gradient.
  std::vector<size_t> differentiable() const;
};

/// What a stage looks like.
struct StageValues {
  int32_t stage = 0;
  std::vector<std::string> inputs;       ///< names of its input values, in order
  std::vector<std::string> outputs;      ///< names of its output values
  std::vector<int64_t> model_positions;  ///< those inputs that the user passes
  bool is_alone = false;                 ///< its mesh is this rank only
};

/// What a stage's forward returns: its outputs, and on the last stage the microbatch's loss.
struct ForwardResult {
  std::vector<at::Tensor> outputs;
  std::optional<at::Tensor> loss;
};

/// What one step is given.
struct StepInputs {
  /// By stage of this rank and microbatch: the model's inputs, in the order of StageValues::model_positions.
  std::map<int32_t, std::vector<std::vector<at::Tensor>>> model_inputs;
  bool has_backward = true;
  uint64_t weights_key = 0;          ///< equal in steps whose W do the same: the same sizes, the same trained parameters
  bool runs_weights_early = true;    ///< W may run before its turn
  bool is_measured = false;          ///< what waits between I and W is counted
  std::vector<double> loss_weights;  ///< by microbatch: the gradient that enters its loss
};

/// Runs the stages of one rank on torch: forward calls into Python, backward runs the autograd engine. Holds, per stage and microbatch in flight, the
/// leaves that stand for received values and the graph's roots; the outputs' own memory goes as soon as they are sent. Threading: one thread, without
/// the GIL.
class StageRunner final : public runtime::ActionRunner {
 public:
  /// Takes the GIL itself where it needs it.
  using Forward = std::function<ForwardResult(int32_t stage, int32_t microbatch, std::vector<at::Tensor> inputs)>;

  StageRunner(std::vector<StageValues> stages, std::vector<EdgeValues> edges, Forward forward);

  const std::vector<EdgeValues>& edges() const { return edges_; }
  /// EdgeValues::differentiable() of an edge.
  const std::vector<size_t>& differentiable(int32_t edge) const { return differentiable_.at(static_cast<size_t>(edge)); }
  /// By stage whose backward I and W cannot split: why not, at its last I. Such an I is the whole backward.
  const std::map<int32_t, std::string>& wholeBecause() const { return whole_because_; }
  bool has(int32_t stage) const { return stages_.contains(stage); }
  void beginStep(StepInputs inputs);
  /// Forgets everything in flight: at the end of a step that is done, and of one that failed.
  void endStep(bool is_done);

  void run(const core::Action& action) override;
  /// True of a stage alone on its mesh, and of one whose W have called no collective so far, a step of the same key among them: others of its mesh
  /// may be elsewhere in their lists. An I that is a whole backward adds to weight gradients too, perhaps to those that stages share: after one, and
  /// on several stages before a step without one, none runs early.
  bool mayRunEarly(int32_t stage) const override;
  /// The same of a step like the last one.
  bool mayRunEarlyNext(int32_t stage) const;
  /// By stage, of the last I of a measured step: the memory that waited for its W, bytes by storage.
  const std::map<int32_t, std::map<const void*, int64_t>>& weightStorages() const { return weight_storages_; }
  void release(const core::Action& action) override;

  /// The values of an edge for its consumer, which nobody else refers to and the microbatch holds until its backward has ended.
  void putValues(int32_t edge, int32_t microbatch, std::vector<at::Tensor> values);
  std::vector<at::Tensor> takeValues(int32_t edge, int32_t microbatch);
  /// Gradients of the differentiable values of an edge.
  void putGradients(int32_t edge, int32_t microbatch, std::vector<at::Tensor> gradients);
  std::vector<at::Tensor> takeGradients(int32_t edge, int32_t microbatch);

 private:
  /// One microbatch on one stage.
  struct Flight {
    std::vector<at::Tensor> inputs;            ///< by input position; leaves where differentiable
    std::vector<at::Tensor> outputs;           ///< by output position, detached; until they are sent
    std::vector<torch::autograd::Edge> roots;  ///< by output position; invalid where no gradient can enter
    std::optional<torch::autograd::Edge> loss;
    at::Tensor loss_gradient;
    std::map<int32_t, std::vector<at::Tensor>> gradients;  ///< by edge out of the stage
    std::vector<at::Tensor> input_gradients;               ///< by input position; after backward
    WeightBackward weights;                                ///< between I and W
  };

  void forward(int32_t stage, int32_t microbatch);
  /// Input and weight gradients.
  void backward(int32_t stage, int32_t microbatch);
  /// Input gradients only; the weights' wait in the flight.
  void backwardInput(int32_t stage, int32_t microbatch);
  void backwardWeight(int32_t stage, int32_t microbatch);
  const StageValues& valuesOf(int32_t stage) const { return stages_.at(stage); }
  Flight& flight(int32_t stage, int32_t microbatch) { return flights_[{stage, microbatch}]; }
  void keepRoots(const StageValues& stage_values, Flight& flight, const ForwardResult& result, int32_t microbatch);
  at::Tensor lossGradient(const at::Tensor& loss, int32_t microbatch);
  std::vector<at::Tensor> sumGradients(int32_t stage, const Flight& flight) const;
  /// What a backward starts from; the flight has none of it any more.
  struct Roots {
    torch::autograd::edge_list edges;
    torch::autograd::variable_list gradients;
  };
  Roots takeRoots(int32_t stage, Flight& flight) const;
  void handOver(int32_t stage, int32_t microbatch, bool is_gradient);

  /// What becomes of one output, or was of one input.
  struct Crossing {
    bool crosses = false;  ///< some edge has it
    bool is_differentiable = false;
  };
  struct StageCrossings {
    std::vector<Crossing> inputs;
    std::vector<Crossing> outputs;
  };

  std::map<int32_t, StageValues> stages_;
  const std::vector<EdgeValues> edges_;
  const Forward forward_;
  std::vector<std::vector<size_t>> differentiable_;  ///< by edge
  std::map<int32_t, StageCrossings> crossings_;      ///< by stage
  StepInputs step_;
  at::Tensor loss_gradient_;  ///< the last one made; equal weights share it
  double loss_gradient_weight_ = 0;
  std::map<std::pair<int32_t, int32_t>, Flight> flights_;
  std::map<int32_t, std::string> whole_because_;
  std::map<int32_t, std::map<const void*, int64_t>> weight_storages_;
  /// Of a stage that is not alone. W run in the list's order until a step of the same key has shown that they call no collective.
  struct SharedWeights {
    bool has_run = false;  ///< in this step
    bool has_collective = false;
    std::optional<uint64_t> known_key;  ///< of the last step that has run them all
  };
  std::map<int32_t, SharedWeights> shared_weights_;
  bool has_input_ = false;   ///< this step has run some I
  bool has_whole_ = false;   ///< one of them was a whole backward
  bool splits_all_ = false;  ///< none was in the last step that had some
};

}  // namespace xmesh::pipeline
