#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/without_gil.h"
#include "pipeline/autograd/split_backward.h"

namespace py = pybind11;

namespace xmesh::bindings {
namespace {

/// The later half, as Python holds it.
struct WeightGradients {
  pipeline::WeightBackward backward;
  std::string whole_because;
  bool has_run = false;

  void run() {
    if (has_run) {
      throw std::runtime_error("the weight gradients have been run already: a split backward's second half runs once");
    }
    has_run = true;
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
  pipeline::InputBackward result;
  withoutGil([&] { result = pipeline::backwardInputs(std::move(roots), std::move(gradients), inputs); });
  py::list found;
  for (const at::Tensor& gradient : result.gradients) {
    found.append(gradient.defined() ? py::cast(gradient) : py::none());
  }
  return py::make_tuple(found, noteHeld({std::move(result.weights), std::move(result.whole_because)}));
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
