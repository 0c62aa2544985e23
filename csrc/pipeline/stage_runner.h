#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/pipeline/segments.h"
#include "pipeline/device_times.h"
#include "pipeline/flights.h"
#include "runtime/pipeline/engine.h"

namespace xmesh::pipeline {

/// What a stage's forward returns: its outputs, and on the last stage the microbatch's loss.
struct ForwardResult {
  std::vector<at::Tensor> outputs;
  std::optional<at::Tensor> loss;
};

/// What one step is given. Nothing of it is kept behind the step.
struct StepInputs {
  /// Computes a stage's forward. Takes the GIL itself where it needs it. It may be the host language's, and lead to all that the user has: who kept
  /// it would keep that alive beyond the language's own end.
  using Forward = std::function<ForwardResult(int32_t stage, int32_t microbatch, std::vector<at::Tensor> inputs)>;
  /// Told of every B and W, once what it made is on its way. Takes the GIL itself, as `forward`. `is_last`: of the step's.
  using WeightsDone = std::function<void(int32_t stage, int32_t microbatch, bool is_last)>;

  Forward forward;
  /// By stage of this rank and microbatch: the model's inputs, in the order of StageValues::model_positions.
  std::map<int32_t, std::vector<std::vector<at::Tensor>>> model_inputs;
  bool has_backward = true;
  uint64_t weights_key = 0;          ///< equal in steps whose W do the same: the same sizes, the same trained parameters
  bool runs_weights_early = true;    ///< W may run before its turn
  bool is_measured = false;          ///< what waits between I and W is counted, and each action waits for its device
  std::vector<double> loss_weights;  ///< by microbatch: the gradient that enters its loss
  WeightsDone weights_done{};        ///< empty: nobody asks
  /// By stage the last B or W of the step.
  std::map<int32_t, core::Action> last_weights{};
};

/// Runs the stages of one rank on torch: forward calls into Python, backward runs the autograd engine. What it computes from and into are the
/// flights. Threading: one thread, without the GIL.
class StageRunner final : public runtime::ActionRunner {
 public:
  /// `segments`: name what runs, in errors.
  explicit StageRunner(Flights& flights, std::shared_ptr<const core::Segments> segments = std::make_shared<const core::Segments>());

  /// By stage whose backward I and W cannot split: why not, at its last I. Such an I is the whole backward.
  const std::map<int32_t, std::string>& wholeBecause() const { return whole_because_; }
  void beginStep(StepInputs inputs);
  /// Ends the step; `is_done`: it has not failed.
  void endStep(bool is_done);

  void run(const core::Action& action) override;
  bool isBusy() const override { return device_times_.isBusy(); }
  /// True of a stage alone on its mesh, and of one whose W have called no collective so far, a step of the same key among them: others of its mesh
  /// may be elsewhere in their lists. An I that is a whole backward adds to weight gradients too, perhaps to those that stages of a group share:
  /// after one, and in a group of several stages before a step without one, none of the group runs early.
  bool mayRunEarly(int32_t stage) const override;
  int32_t weightsGroup(int32_t stage) const override { return flights_.stage(stage).weights_group; }
  size_t numWeightsGroups() const override { return groups_.size(); }
  /// The same of a step like the last one.
  bool mayRunEarlyNext(int32_t stage) const;
  /// By stage, of the last I of a measured step: the memory that waited for its W, bytes by storage.
  const std::map<int32_t, std::map<const void*, int64_t>>& weightStorages() const { return weight_storages_; }
  /// When the actions of the last step were on their devices; waits for these. Nothing of actions on cpu.
  const std::map<core::Action, DeviceSpan>& deviceSpans() const { return device_times_.spans(); }
  void release(const core::Action& action) override { flights_.release(action); }
  /// Tells of a B or W.
  void follow(const core::Action& action) override;

 private:
  void compute(const core::Action& action);
  void forward(int32_t stage, int32_t microbatch);
  /// Input and weight gradients.
  void backward(int32_t stage, int32_t microbatch);
  /// Input gradients only; the weights' wait in the flight.
  void backwardInput(int32_t stage, int32_t microbatch);
  void backwardWeight(int32_t stage, int32_t microbatch);
  void keepRoots(int32_t stage, int32_t microbatch, const ForwardResult& result);
  at::Tensor lossGradient(const at::Tensor& loss, int32_t microbatch);
  /// What a backward starts from; the flight has none of it any more.
  struct Roots {
    torch::autograd::edge_list edges;
    torch::autograd::variable_list gradients;
  };
  Roots takeRoots(int32_t stage, int32_t microbatch);

  Flights& flights_;
  std::shared_ptr<const core::Segments> segments_;
  StepInputs step_;
  at::Tensor loss_gradient_;  ///< the last one made; equal weights share it
  double loss_gradient_weight_ = 0;
  DeviceTimes device_times_;
  std::map<int32_t, std::string> whole_because_;
  std::map<int32_t, std::map<const void*, int64_t>> weight_storages_;
  /// What is known of the W of a stage that shares its mesh. They run in the list's order until a step of the same key has shown that they call no
  /// collective.
  struct SharedWeights {
    bool has_run = false;  ///< in this step
    bool has_collective = false;
    std::optional<uint64_t> known_key;  ///< the key of the last step that has run them all
  };
  std::map<int32_t, SharedWeights> shared_weights_;
  /// What is known of the I of the stages that add to the same gradients.
  struct WeightsGroup {
    int32_t stage = -1;        ///< one of them
    bool has_several = false;  ///< stages
    bool has_input = false;    ///< this step has run some I
    bool has_whole = false;    ///< one of them was a whole backward
    bool splits_all = false;   ///< none was in the last step that had some
  };
  const WeightsGroup& groupOf(int32_t stage) const { return groups_.at(weightsGroup(stage)); }
  std::map<int32_t, WeightsGroup> groups_;
};

}  // namespace xmesh::pipeline
