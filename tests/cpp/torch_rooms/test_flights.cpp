#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "pipeline/flights.h"

namespace xmesh::pipeline {
namespace {

using core::ActionKind;

/// Stage 0 makes "a" and "b"; stage 1, on this rank too, reads both in the other order, stage 2, elsewhere, reads "a" as well. "b" has no gradient.
class FlightsTest : public ::testing::Test {
 protected:
  static std::vector<StageValues> stages() { return {{0, {"x"}, {"a", "b"}, {0}, true}, {1, {"b", "a"}, {"c"}, {}, true}}; }
  static std::vector<EdgeValues> edges(bool drops = false) {
    EdgeValues local{0, 1, {0, 1}, {1, 0}, {1, 0}, {0, 0}, true, true, true};
    EdgeValues away{0, 2, {0}, {0}, {1}, {static_cast<uint8_t>(drops)}, false, true, false};
    return {local, away};
  }

  Flights flights_{stages(), edges()};
};

TEST_F(FlightsTest, KnowsWhatCrosses) {
  EXPECT_EQ(flights_.differentiable(0), std::vector<size_t>({0}));
  EXPECT_TRUE(flights_.outputUses(0)[0].is_differentiable);
  EXPECT_TRUE(flights_.outputUses(0)[1].crosses);
  EXPECT_FALSE(flights_.outputUses(0)[1].is_differentiable);
  EXPECT_FALSE(flights_.outputUses(1)[0].crosses) << "the model's output";
  EXPECT_TRUE(flights_.inputUses(1)[1].is_differentiable);
  EXPECT_FALSE(flights_.has(2));
}

TEST_F(FlightsTest, ValuesArriveByPositionAsLeaves) {
  flights_.at(0, 3).outputs = {at::full({2}, 1.0F), at::full({2}, 2.0F)};
  flights_.handOver(0, 3, /*is_gradient=*/false);
  const Flight& there = flights_.at(1, 3);
  EXPECT_EQ(there.inputs.at(0)[0].item<float>(), 2);
  EXPECT_EQ(there.inputs.at(1)[0].item<float>(), 1);
  EXPECT_FALSE(there.inputs[0].requires_grad());
  EXPECT_TRUE(there.inputs[1].requires_grad() && there.inputs[1].is_leaf());
  EXPECT_FALSE(flights_.at(0, 3).outputs[0].requires_grad()) << "the one that is sent elsewhere is not the leaf";
}

TEST_F(FlightsTest, WithoutABackwardThereAreNoLeaves) {
  flights_.begin(/*has_backward=*/false);
  flights_.putValues(0, 0, {at::ones({1}), at::ones({1})});
  EXPECT_FALSE(flights_.at(1, 0).inputs.at(1).requires_grad());
  flights_.release({ActionKind::kForward, 0, 0});
  EXPECT_TRUE(flights_.at(0, 0).outputs.empty());
}

TEST_F(FlightsTest, GradientsOfAllConsumersAreAdded) {
  flights_.at(0, 0).roots.resize(2);
  flights_.at(1, 0).input_gradients = {at::Tensor(), at::full({1}, 3.0F)};
  flights_.handOver(1, 0, /*is_gradient=*/true);
  EXPECT_EQ(flights_.sumOfGradients(0, 0)[0].item<float>(), 3);
  flights_.putGradients(1, 0, {at::full({1}, 4.0F)});
  const std::vector<at::Tensor> sums = flights_.sumOfGradients(0, 0);
  EXPECT_EQ(sums[0].item<float>(), 7);
  EXPECT_FALSE(sums[1].defined());
}

TEST_F(FlightsTest, AGradientThatAnotherRankTakesIsDropped) {
  Flights flights(stages(), edges(/*drops=*/true));
  flights.at(0, 0).roots.resize(2);
  flights.putGradients(1, 0, {at::full({1}, 4.0F)});
  EXPECT_FALSE(flights.sumOfGradients(0, 0)[0].defined());
}

TEST_F(FlightsTest, MemoryGoesAsSoonAsItIsNotNeeded) {
  Flight& flight = flights_.at(0, 0);
  flight.inputs = {at::ones({1})};
  flight.outputs = {at::ones({1}), at::ones({1})};
  flight.input_gradients = {at::ones({1})};
  flights_.release({ActionKind::kForward, 0, 0});
  EXPECT_TRUE(flights_.at(0, 0).outputs.empty());
  EXPECT_EQ(flights_.at(0, 0).inputs.size(), 1U);
  flights_.release({ActionKind::kBackwardInput, 0, 0});
  EXPECT_TRUE(flights_.at(0, 0).input_gradients.empty());
  flights_.release({ActionKind::kBackwardWeight, 0, 0});
  EXPECT_TRUE(flights_.at(0, 0).inputs.empty()) << "nothing is left of it";
}

}  // namespace
}  // namespace xmesh::pipeline
