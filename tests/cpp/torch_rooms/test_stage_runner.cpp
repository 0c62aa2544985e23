#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "pipeline/stage_runner.h"

namespace xmesh::pipeline {
namespace {

using core::ActionKind;

/// Two stages of one rank, y = x * w each, the second with the loss sum(y); gradients are those of one backward through both. By turns the second one
/// holds what it is given, or not.
class StageRunnerTest : public ::testing::TestWithParam<bool> {
 protected:
  StageRunnerTest() {
    for (at::Tensor& weight : weights_) {
      weight.requires_grad_();
    }
  }
  ForwardResult forward(int32_t stage, const std::vector<at::Tensor>& inputs) {
    const at::Tensor y = inputs.at(0) * weights_[static_cast<size_t>(stage)];
    return stage == 0 ? ForwardResult{{y}, {}} : ForwardResult{{}, y.sum()};
  }
  void begin(int64_t microbatches) {
    StepInputs inputs;
    inputs.forward = [this, held = held_](int32_t stage, int32_t, std::vector<at::Tensor> given) { return forward(stage, given); };
    for (int64_t i = 0; i < microbatches; ++i) {
      inputs.model_inputs[0].push_back({at::full({2}, static_cast<float>(i + 1))});
      inputs.loss_weights.push_back(0.5);
    }
    inputs.last_weights = last_weights_;
    inputs.weights_done = [this](int32_t stage, int32_t microbatch, bool is_last) {
      EXPECT_TRUE(weights_[static_cast<size_t>(stage)].grad().defined());
      told_.push_back(std::to_string(stage) + "." + std::to_string(microbatch) + (is_last ? " last" : ""));
    };
    runner_.beginStep(std::move(inputs));
  }
  void run(ActionKind kind, int32_t stage, int32_t microbatch) {
    runner_.run({kind, stage, microbatch});
    runner_.release({kind, stage, microbatch});
    runner_.follow({kind, stage, microbatch});
  }

  std::vector<at::Tensor> weights_ = {at::full({2}, 3.0F), at::full({2}, 5.0F)};
  Flights flights_{{{0, {"x"}, {"y"}, {0}, true}, {1, {"y"}, {}, {}, true}}, {EdgeValues{0, 1, {0}, {0}, {1}, {0}, true, true, true, GetParam()}}};
  StageRunner runner_{flights_};
  std::shared_ptr<int> held_ = std::make_shared<int>();  ///< by the forward
  std::map<int32_t, core::Action> last_weights_;
  std::vector<std::string> told_;  ///< of weights
};

TEST_P(StageRunnerTest, WholeBackwards) {
  begin(2);
  for (const int32_t microbatch : {0, 1}) {
    run(ActionKind::kForward, 0, microbatch);
    run(ActionKind::kForward, 1, microbatch);
  }
  for (const int32_t microbatch : {1, 0}) {
    run(ActionKind::kBackward, 1, microbatch);
    run(ActionKind::kBackward, 0, microbatch);
  }
  runner_.endStep(/*is_done=*/true);
  EXPECT_EQ(weights_[0].grad()[0].item<float>(), 0.5F * 5 * (1 + 2));
  EXPECT_EQ(weights_[1].grad()[1].item<float>(), 0.5F * 3 * (1 + 2));
}

TEST_P(StageRunnerTest, WhatIsPassedOnIsNotHeld) {
  begin(1);
  run(ActionKind::kForward, 0, 0);
  EXPECT_EQ(flights_.at(1, 0).inputs.at(0).storage().nbytes(), 2 * sizeof(float));
  run(ActionKind::kForward, 1, 0);
  const at::Tensor held = flights_.at(1, 0).inputs.at(0);
  EXPECT_TRUE(held.is_leaf() && held.requires_grad());
  EXPECT_EQ(held.sizes(), at::IntArrayRef({2}));
  EXPECT_EQ(held.storage().nbytes(), (GetParam() ? 1 : 2) * sizeof(float));
  run(ActionKind::kBackward, 1, 0);
  run(ActionKind::kBackward, 0, 0);
  EXPECT_EQ(weights_[0].grad()[0].item<float>(), 0.5F * 5);
}

TEST_P(StageRunnerTest, WeightsWaitForTheirTurn) {
  begin(1);
  run(ActionKind::kForward, 0, 0);
  run(ActionKind::kForward, 1, 0);
  run(ActionKind::kBackwardInput, 1, 0);
  run(ActionKind::kBackwardInput, 0, 0);
  EXPECT_FALSE(weights_[1].grad().defined());
  EXPECT_TRUE(runner_.wholeBecause().empty());
  run(ActionKind::kBackwardWeight, 0, 0);
  run(ActionKind::kBackwardWeight, 1, 0);
  runner_.endStep(/*is_done=*/true);
  EXPECT_EQ(weights_[0].grad()[0].item<float>(), 0.5F * 5);
  EXPECT_EQ(weights_[1].grad()[0].item<float>(), 0.5F * 3);
  EXPECT_TRUE(runner_.mayRunEarlyNext(0)) << "all were split";
}

TEST_P(StageRunnerTest, TellsOfEachWeightGradientOnceItIsThere) {
  last_weights_ = {{0, {ActionKind::kBackwardWeight, 0, 1}}, {1, {ActionKind::kBackward, 1, 1}}};
  begin(2);
  for (const int32_t microbatch : {0, 1}) {
    run(ActionKind::kForward, 0, microbatch);
    run(ActionKind::kForward, 1, microbatch);
    run(ActionKind::kBackward, 1, microbatch);
    run(ActionKind::kBackwardInput, 0, microbatch);
  }
  run(ActionKind::kBackwardWeight, 0, 0);
  run(ActionKind::kBackwardWeight, 0, 1);
  EXPECT_EQ(told_, (std::vector<std::string>{"1.0", "1.1 last", "0.0", "0.1 last"}));
}

TEST_P(StageRunnerTest, NoWeightsRunEarlyBehindWhichGradientsAreAddedUp) {
  for (const bool waits_in_weights : {false, true}) {
    Flights flights{{{0, {"x"}, {}, {0}, true, "", waits_in_weights}}, {}};
    StageRunner runner(flights);
    StepInputs inputs;
    inputs.forward = [this](int32_t, int32_t, const std::vector<at::Tensor>& given) { return ForwardResult{{}, (given.at(0) * weights_[0]).sum()}; };
    inputs.model_inputs[0].push_back({at::ones({2})});
    inputs.loss_weights.push_back(1);
    runner.beginStep(std::move(inputs));
    EXPECT_EQ(runner.mayRunEarly(0), !waits_in_weights);
    for (const ActionKind kind : {ActionKind::kForward, ActionKind::kBackwardInput, ActionKind::kBackwardWeight}) {
      runner.run({kind, 0, 0});
      runner.release({kind, 0, 0});
    }
    runner.endStep(/*is_done=*/true);
    EXPECT_EQ(runner.mayRunEarlyNext(0), !waits_in_weights);
  }
}

TEST_P(StageRunnerTest, AFailedStepLeavesNothing) {
  begin(1);
  run(ActionKind::kForward, 0, 0);
  EXPECT_GT(held_.use_count(), 1);
  runner_.endStep(/*is_done=*/false);
  EXPECT_EQ(held_.use_count(), 1) << "what computed the step is let go of";
  EXPECT_TRUE(flights_.at(1, 0).inputs.empty());
}

TEST_P(StageRunnerTest, AnotherNumberOfOutputsIsRefused) {
  StageRunner runner(flights_);
  StepInputs inputs;
  inputs.forward = [](int32_t, int32_t, const std::vector<at::Tensor>&) { return ForwardResult{}; };
  inputs.model_inputs[0].push_back({at::ones({2})});
  inputs.loss_weights.push_back(1);
  runner.beginStep(std::move(inputs));
  EXPECT_THROW(runner.run({ActionKind::kForward, 0, 0}), core::InvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Held, StageRunnerTest, ::testing::Bool());

}  // namespace
}  // namespace xmesh::pipeline
