// What of a stage's backward depends on autograd's device threads, on the emulated accelerator: a backward of its tensors runs on such a thread.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceType.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pipeline/autograd/split_backward.h"
#include "pipeline/collective_watch.h"
#include "runtime.h"

namespace xmesh::pipeline {
namespace {

using at::Tensor;
using Variables = torch::autograd::variable_list;
using torch::autograd::AutogradContext;

const at::TensorOptions kOnDevice = at::TensorOptions(at::kFloat).device(c10::Device(emu::kDeviceType, 0));

/// Passes its input on; its backward calls what has a collective's name.
struct CollectiveInBackward : torch::autograd::Function<CollectiveInBackward> {
  static Variables forward(AutogradContext* /*context*/, const Tensor& input) { return {input.clone()}; }
  static Variables backward(AutogradContext* /*context*/, Variables gradients) {
    thread = std::this_thread::get_id();
    RECORD_FUNCTION("c10d::allreduce_", std::vector<c10::IValue>());
    return gradients;
  }
  static std::thread::id thread;
};
std::thread::id CollectiveInBackward::thread;

/// Autograd asks which accelerator there is, by whether it has a name.
class AutogradThreads : public testing::Test {
 protected:
  static void SetUpTestSuite() { c10::register_privateuse1_backend("emu"); }
};

TEST_F(AutogradThreads, AWatchSeesACollectiveOfItsThreadsBackward) {
  const Tensor leaf = at::ones({2}, kOnDevice).requires_grad_();
  const Tensor out = CollectiveInBackward::apply(leaf).front();
  const CollectiveWatch watch;
  bool other_has_seen = true;
  std::thread([&] {
    const CollectiveWatch other;
    torch::autograd::backward({out}, {at::ones({2}, kOnDevice)}, /*retain_graph=*/true);
    other_has_seen = other.hasSeen();
  }).join();
  EXPECT_NE(CollectiveInBackward::thread, std::this_thread::get_id());
  EXPECT_TRUE(other_has_seen);
  EXPECT_FALSE(watch.hasSeen()) << "of a backward that another thread runs";
  torch::autograd::backward({out}, {at::ones({2}, kOnDevice)});
  EXPECT_NE(CollectiveInBackward::thread, std::this_thread::get_id());
  EXPECT_TRUE(watch.hasSeen());
}

/// By the names of autograd's nodes, the threads on which they ran.
struct Ran {
  std::mutex mutex;
  std::vector<std::pair<std::string, std::thread::id>> nodes;
};
Ran ran;

std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& function) {
  const std::lock_guard lock(ran.mutex);
  ran.nodes.emplace_back(function.name(), std::this_thread::get_id());
  return nullptr;
}

/// The weight goes into three factors, made in the reverse order of their use. A whole backward runs them in the order in which they were made.
Tensor chain(const Tensor& input, const Tensor& weight) {
  const Tensor last = weight * 1e8F;
  const Tensor second = weight * 1.0F;
  const Tensor first = weight * -1e8F;
  return ((input * first) * second) * last;
}

TEST_F(AutogradThreads, TheWeightsPartRunsInTheOrderOfAWholeBackward) {
  const Tensor values = at::full({4}, 1.25F, kOnDevice);
  const Tensor whole_weight = values.clone().requires_grad_();
  torch::autograd::backward({chain(values.clone().requires_grad_(), whole_weight)}, {values});

  const Tensor input = values.clone().requires_grad_();
  const Tensor weight = values.clone().requires_grad_();
  const Tensor output = chain(input, weight);
  InputBackward split = backwardInputs({torch::autograd::impl::gradient_edge(output)}, {values}, {input});
  ASSERT_EQ(split.whole_because, "");
  ran.nodes.clear();
  const at::CallbackHandle handle = at::addThreadLocalCallback(at::RecordFunctionCallback(&note).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  split.weights.run();
  at::removeCallback(handle);

  std::set<std::thread::id> threads;
  int num_held = 0;
  for (const auto& [name, thread] : ran.nodes) {
    num_held += name == "xmesh::HeldGradients" ? 1 : 0;
    threads.insert(thread);
  }
  EXPECT_EQ(num_held, 3);
  EXPECT_EQ(threads.size(), 1U);
  EXPECT_EQ(threads.count(std::this_thread::get_id()), 0U);
  EXPECT_TRUE(weight.grad().to(at::kCPU).equal(whole_weight.grad().to(at::kCPU)));
}

}  // namespace
}  // namespace xmesh::pipeline
