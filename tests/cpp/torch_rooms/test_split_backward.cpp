// Cuts of graphs made in C++: with no interpreter there is no hook of Python, and every node is one of torch's own.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <stdexcept>
#include <vector>

#include "core/error.h"
#include "pipeline/autograd/node_kinds.h"
#include "pipeline/autograd/path_to_inputs.h"
#include "pipeline/autograd/split_backward.h"

namespace xmesh::pipeline {
namespace {

using at::Tensor;
using torch::autograd::Edge;
using torch::autograd::impl::gradient_edge;
using Tensors = std::vector<Tensor>;
/// Outputs of inputs and weights.
using Model = std::function<Tensors(const Tensors& inputs, const Tensors& weights)>;

Tensors random(size_t count) {
  Tensors out;
  for (size_t i = 0; i < count; ++i) {
    out.push_back(at::randn({4, 4}));
  }
  return out;
}

Tensors leaves(const Tensors& values) {
  Tensors out;
  for (const Tensor& value : values) {
    out.push_back(value.clone().requires_grad_());
  }
  return out;
}

InputBackward split(const Tensors& outputs, const Tensors& gradients, const Tensors& inputs) {
  torch::autograd::edge_list roots;
  for (const Tensor& output : outputs) {
    roots.push_back(gradient_edge(output));
  }
  return backwardInputs(std::move(roots), gradients, inputs);
}

void expectSame(const Tensor& found, const Tensor& expected, const char* what) {
  ASSERT_EQ(found.defined(), expected.defined()) << what;
  EXPECT_TRUE(!found.defined() || found.equal(expected)) << what;
}

/// Both halves against one whole backward, to the bit. Returns how many bytes waited for the second half.
int64_t compare(const Model& model, size_t num_inputs, size_t num_weights) {
  const Tensors inputs = random(num_inputs);
  const Tensors weights = random(num_weights);
  const Tensors whole_inputs = leaves(inputs);
  const Tensors whole_weights = leaves(weights);
  const Tensors split_inputs = leaves(inputs);
  const Tensors split_weights = leaves(weights);
  const Tensors whole_outputs = model(whole_inputs, whole_weights);
  const Tensors split_outputs = model(split_inputs, split_weights);
  Tensors gradients;
  for (const Tensor& output : whole_outputs) {
    gradients.push_back(at::randn_like(output));
  }
  torch::autograd::backward(whole_outputs, gradients);
  InputBackward found = split(split_outputs, gradients, split_inputs);
  EXPECT_EQ(found.whole_because, "");
  EXPECT_EQ(found.gradients.size(), num_inputs);
  for (size_t i = 0; i < num_inputs; ++i) {
    expectSame(found.gradients[i], whole_inputs[i].grad(), "an input's gradient");
    EXPECT_FALSE(split_inputs[i].grad().defined()) << "the caller's to keep";
  }
  for (const Tensor& weight : split_weights) {
    EXPECT_FALSE(weight.grad().defined()) << "before its turn";
  }
  int64_t held = 0;
  for (const auto& [storage, num_bytes] : found.weights.heldStorages()) {
    held += num_bytes;
  }
  found.weights.run();
  for (size_t i = 0; i < num_weights; ++i) {
    expectSame(split_weights[i].grad(), whole_weights[i].grad(), "a weight's gradient");
  }
  return held;
}

constexpr int64_t kBytes = 4 * 4 * 4;  // of each tensor here

TEST(SplitBackward, KindsOfNodesAreFoundByName) {
  const Tensors x = leaves(random(2));
  EXPECT_EQ(kindOf(*x[0].mm(x[1]).grad_fn()), NodeKind::kEarly);
  EXPECT_EQ(kindOf(*at::addmm(x[0], x[0], x[1]).grad_fn()), NodeKind::kEarly);
  EXPECT_EQ(kindOf(*(x[0] * x[1]).grad_fn()), NodeKind::kLate);
  const Tensor base = x[0].clone();
  base.select(0, 1).mul_(2);
  EXPECT_EQ(kindOf(*base.grad_fn()), NodeKind::kCopySlices);
  EXPECT_TRUE(savesNothing(*x[0].t().grad_fn()));
  EXPECT_FALSE(savesNothing(*x[0].exp().grad_fn()));
}

TEST(SplitBackward, AProductKeepsWhatItsWeightNeeds) {
  const auto product = [](const Tensors& x, const Tensors& w) -> Tensors { return {x[0].mm(w[0])}; };
  EXPECT_EQ(compare(product, 1, 1), 3 * kBytes) << "the gradient, and both that the product saved";
}

TEST(SplitBackward, ElsewhereTheWeightsGradientIsKept) {
  const auto scaled = [](const Tensors& x, const Tensors& w) -> Tensors { return {x[0] * w[0]}; };
  EXPECT_EQ(compare(scaled, 1, 1), kBytes);
}

TEST(SplitBackward, AProductWithAHookRunsOnce) {
  int num_calls = 0;
  const auto hooked = [&](const Tensors& x, const Tensors& w) -> Tensors {
    const Tensor y = x[0].mm(w[0]);
    y.register_hook([&](const Tensor& gradient) {
      ++num_calls;
      return gradient * 2;
    });
    return {y.tanh()};
  };
  EXPECT_EQ(compare(hooked, 1, 1), kBytes);
  EXPECT_EQ(num_calls, 2) << "in the whole backward and in the split one";
}

TEST(SplitBackward, DeepSharedAndInPlace) {
  compare(
      [](const Tensors& x, const Tensors& w) -> Tensors {
        Tensor y = at::addmm(w[2], x[0], w[0]).tanh() + x[1];
        for (int i = 0; i < 3; ++i) {
          y = y.mm(w[1]).relu() + y;  // one weight, three times
        }
        Tensor z = y * 1;
        z.select(0, 1).mul_(w[2].select(0, 0));
        return {z, (y * w[0]).sum(), w[1].square()};  // the last one hangs on weights alone
      },
      2, 3);
}

TEST(SplitBackward, AnInputThatNothingDependsOnHasNoGradient) {
  compare([](const Tensors& x, const Tensors& w) -> Tensors { return {x[0].mm(w[0])}; }, 2, 2);
}

TEST(SplitBackward, InputsThatAreComputedEndTheBackward) {
  const Tensors w = leaves(random(2));
  const Tensor hidden = at::randn({4, 4}).mm(w[0]).tanh();
  InputBackward found = split({hidden.mm(w[1])}, {at::ones({4, 4})}, {hidden});
  found.weights.run();
  EXPECT_TRUE(found.gradients.at(0).defined());
  EXPECT_TRUE(w[1].grad().defined());
  EXPECT_FALSE(w[0].grad().defined());
  split({hidden}, found.gradients, {}).weights.run();
  EXPECT_TRUE(w[0].grad().defined());
}

TEST(SplitBackward, AFailedFirstHalfLeavesTheGraphAsItWas) {
  const Tensors x = leaves(random(1));
  const Tensors w = leaves(random(2));
  const Tensor input = x[0] * 1;
  const Tensor y = input * w[0];
  const Tensor output = y.mm(w[1]);
  bool fails = true;
  output.register_hook([&](const Tensor& /*gradient*/) {
    if (fails) {
      throw std::runtime_error("once");
    }
  });
  EXPECT_THROW(split({output}, {at::ones({4, 4})}, {input}), std::runtime_error);
  fails = false;
  output.backward(at::ones({4, 4}));
  const Tensor given = at::ones({4, 4}).mm(w[1].t());
  expectSame(x[0].grad(), given * w[0], "the input");
  expectSame(w[0].grad(), given * x[0], "a factor");
  expectSame(w[1].grad(), y.t().mm(at::ones({4, 4})), "a matrix");
}

TEST(SplitBackward, NoOtherBackwardGoesThroughTheGraph) {
  const Tensors x = leaves(random(1));
  const Tensors w = leaves(random(1));
  const Tensor output = x[0] * 1 + w[0];  // saves nothing that would be missing
  InputBackward found = split({output}, {at::ones({4, 4})}, {x[0]});
  EXPECT_THROW(output.sum().backward(), std::runtime_error);
  found.weights.run();
  expectSame(w[0].grad(), at::ones({4, 4}), "the weight");
}

TEST(SplitBackward, IsWholeWhereTheCallerSaysSo) {
  const Tensors x = leaves(random(1));
  const Tensors w = leaves(random(2));
  const Tensor output = x[0].mm(w[0]);
  InputBackward found = backwardInputs({gradient_edge(output), gradient_edge(w[1])}, {at::ones({4, 4}), at::ones({4, 4})}, x, "it says so");
  EXPECT_EQ(found.whole_because, "it says so");
  expectSame(found.gradients[0], at::ones({4, 4}).mm(w[0].t()), "the input");
  expectSame(w[0].grad(), x[0].t().mm(at::ones({4, 4})), "the weight, at once");
  expectSame(w[1].grad(), at::ones({4, 4}), "what is off the path, at once");
  found.weights.run();
  expectSame(w[0].grad(), x[0].t().mm(at::ones({4, 4})), "the weight, once");
}

TEST(SplitBackward, IsNotWholeForTheCallersReasonWithoutInputs) {
  const Tensors w = leaves(random(1));
  InputBackward found = backwardInputs({gradient_edge(w[0])}, {at::ones({4, 4})}, {}, "it says so");
  EXPECT_EQ(found.whole_because, "");
  EXPECT_FALSE(w[0].grad().defined());
  found.weights.run();
  expectSame(w[0].grad(), at::ones({4, 4}), "the weight, later");
}

TEST(SplitBackward, InputsThatDependOnOneAnotherAreRefused) {
  const Tensors x = leaves(random(1));
  const Tensor hidden = x[0].tanh();
  const Tensor output = hidden + x[0];
  EXPECT_THROW(split({output}, {at::ones({4, 4})}, {x[0], hidden}), core::InvalidArgument);
  EXPECT_THROW(split({output}, {at::ones({4, 4})}, {hidden, x[0]}), core::InvalidArgument);
  EXPECT_THROW(split({output}, {at::ones({4, 4})}, {x[0], x[0]}), core::InvalidArgument);
}

TEST(PathToInputs, IsWhatLiesBetween) {
  const Tensors x = leaves(random(2));
  const Tensor input = x[0].exp();  // the node that an input's gradient belongs to is not looked at
  const Tensor beside = x[1].exp();
  const Tensor both = input * beside;
  const Tensor output = both + both.tanh();
  PathToInputs path({gradient_edge(input)});
  path.visit(gradient_edge(output));
  path.visit(gradient_edge(both));  // again
  EXPECT_TRUE(path.isInput(gradient_edge(input)));
  EXPECT_FALSE(path.isInput(gradient_edge(beside)));
  for (const Tensor& one : {output, both, input}) {
    EXPECT_TRUE(path.contains(gradient_edge(one)));
  }
  for (const Tensor& one : {beside, x[0], x[1]}) {
    EXPECT_FALSE(path.contains(gradient_edge(one)));
  }
  EXPECT_EQ(path.visits().size(), 5U) << "each node once: the sum, tanh, the product, exp beside, its leaf";
}

}  // namespace
}  // namespace xmesh::pipeline
