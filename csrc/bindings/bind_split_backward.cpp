#include <c10/util/ScopeExit.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <set>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/without_gil.h"
#include "pipeline/autograd/held_gradients.h"
#include "pipeline/autograd/split_backward.h"

namespace py = pybind11;

namespace xmesh::bindings {
namespace {

constexpr const char* kOwned = "this graph belongs to a split backward: no other backward can run through it; compute the forward once more";

/// In front of every node that a split backward has altered: any backward but its own would find part of the graph, and say nothing.
class OwnedGraph final : public torch::autograd::FunctionPreHook {
 public:
  explicit OwnedGraph(std::shared_ptr<const std::atomic<bool>> is_running) : is_running_(std::move(is_running)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    if (!*is_running_) {
      throw std::runtime_error(kOwned);
    }
    return gradients;
  }

 private:
  const std::shared_ptr<const std::atomic<bool>> is_running_;
};

/// The nodes on the way from roots to inputs, which a split alters. What weights are computed by is not among them: other graphs may have it too,
/// such as autocast's casts. Throws where another split backward has one.
std::vector<pipeline::NodePtr> pathOf(const torch::autograd::edge_list& roots, const std::vector<at::Tensor>& inputs) {
  using torch::autograd::Node;
  std::set<std::pair<const Node*, uint32_t>> ends;
  for (const at::Tensor& input : inputs) {
    const torch::autograd::Edge edge = torch::autograd::impl::gradient_edge(input);
    ends.emplace(edge.function.get(), edge.input_nr);
  }
  std::unordered_map<const Node*, std::vector<pipeline::NodePtr>> before;  // by node, those that lead to it
  std::unordered_set<const Node*> seen;
  std::vector<pipeline::NodePtr> todo;
  std::vector<pipeline::NodePtr> reached;  // from which an input is next
  const auto visit = [&](const torch::autograd::Edge& edge) {
    if (edge.function != nullptr && !ends.contains({edge.function.get(), edge.input_nr}) && seen.insert(edge.function.get()).second) {
      todo.push_back(edge.function);
    }
  };
  std::for_each(roots.begin(), roots.end(), visit);
  while (!todo.empty()) {
    const pipeline::NodePtr node = std::move(todo.back());
    todo.pop_back();
    for (const auto& hook : node->pre_hooks()) {
      if (dynamic_cast<const OwnedGraph*>(hook.get()) != nullptr) {
        throw std::runtime_error(kOwned);
      }
    }
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      if (edge.function != nullptr && ends.contains({edge.function.get(), edge.input_nr})) {
        reached.push_back(node);
      } else if (edge.function != nullptr) {
        before[edge.function.get()].push_back(node);
      }
      visit(edge);
    }
  }
  std::unordered_set<const Node*> on_path;
  std::vector<pipeline::NodePtr> out;
  while (!reached.empty()) {
    const pipeline::NodePtr node = std::move(reached.back());
    reached.pop_back();
    if (!on_path.insert(node.get()).second) {
      continue;
    }
    out.push_back(node);
    const std::vector<pipeline::NodePtr>& more = before[node.get()];
    reached.insert(reached.end(), more.begin(), more.end());
  }
  return out;
}

/// The later half, as Python holds it.
struct WeightGradients {
  pipeline::WeightBackward backward;
  std::string whole_because;
  std::shared_ptr<std::atomic<bool>> is_running = std::make_shared<std::atomic<bool>>(false);
  bool has_run = false;

  void run() {
    if (has_run) {
      throw std::runtime_error("the weight gradients have been run already: a split backward's second half runs once");
    }
    has_run = true;
    *is_running = true;
    const auto ended = c10::make_scope_exit([this] { *is_running = false; });
    withoutGil([this] { backward.run(); });
  }
};

/// Those that Python holds. Their graphs may lead back to what holds them, by ways that Python's garbage collector does not see. With the GIL.
std::vector<std::weak_ptr<WeightGradients>>& held() {
  static auto* const all = new std::vector<std::weak_ptr<WeightGradients>>;
  return *all;
}

std::shared_ptr<WeightGradients> noteHeld(WeightGradients gradients) {
  std::erase_if(held(), [](const std::weak_ptr<WeightGradients>& one) { return one.expired(); });
  auto out = std::make_shared<WeightGradients>(std::move(gradients));
  held().emplace_back(out);
  return out;
}

/// Lets go of what has not been run; for the end of the interpreter.
void dropWeightGradients() {
  for (const std::weak_ptr<WeightGradients>& one : std::exchange(held(), {})) {
    if (const std::shared_ptr<WeightGradients> left = one.lock()) {
      left->has_run = true;
      left->backward = {};
    }
  }
}

py::tuple splitBackward(const std::vector<at::Tensor>& outputs, std::vector<at::Tensor> gradients, const std::vector<at::Tensor>& inputs) {
  torch::autograd::edge_list roots;
  for (const at::Tensor& output : outputs) {
    roots.push_back(torch::autograd::impl::gradient_edge(output));
  }
  const std::vector<pipeline::NodePtr> path = pathOf(roots, inputs);
  pipeline::InputBackward result;
  withoutGil([&] { result = pipeline::backwardInputs(std::move(roots), std::move(gradients), inputs); });
  py::list found;
  for (const at::Tensor& gradient : result.gradients) {
    found.append(gradient.defined() ? py::cast(gradient) : py::none());
  }
  WeightGradients later{std::move(result.weights), std::move(result.whole_because)};
  if (later.whole_because.empty()) {
    for (const pipeline::NodePtr& node : path) {
      node->add_pre_hook(std::make_unique<OwnedGraph>(later.is_running));
    }
  }
  return py::make_tuple(found, noteHeld(std::move(later)));
}

}  // namespace

void bindSplitBackward(py::module_& module) {
  py::class_<WeightGradients, std::shared_ptr<WeightGradients>>(module, "WeightGradients")
      .def("__call__", &WeightGradients::run)
      .def_property_readonly("whole_because", [](const WeightGradients& self) -> std::optional<std::string> {
        return self.whole_because.empty() ? std::nullopt : std::optional(self.whole_because);
      });
  module.def("drop_weight_gradients", &dropWeightGradients);
  module.def("split_backward", &splitBackward, py::arg("outputs"), py::arg("gradients"), py::arg("inputs"));
}

}  // namespace xmesh::bindings
