#include "pipeline/autograd/python_hooks.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_hook.h>

#include <array>
#include <string_view>

namespace xmesh::pipeline {
namespace {

namespace py = pybind11;

constexpr std::array<std::string_view, 3> kLibraries = {"torch.distributed.fsdp", "torch.distributed._composable", "torch.nn.parallel"};

/// Where the function is from that a hook calls in the end: behind partial() and bound methods too.
std::string moduleOf(py::object hook) {
  while (py::hasattr(hook, "func")) {
    hook = hook.attr("func");
  }
  const py::object module = py::getattr(hook, "__module__", py::none());
  return py::isinstance<py::str>(module) ? module.cast<std::string>() : std::string();
}

std::string libraryIn(PyObject* hooks) {
  if (hooks == nullptr || PyDict_Check(hooks) == 0) {
    return {};
  }
  for (const auto& [key, hook] : py::reinterpret_borrow<py::dict>(hooks)) {
    const std::string module = moduleOf(py::reinterpret_borrow<py::object>(hook));
    for (const std::string_view library : kLibraries) {
      if (module.compare(0, library.size(), library) == 0) {
        return module;
      }
    }
  }
  return {};
}

}  // namespace

std::string parallelLibraryHook(torch::autograd::Node& node) {
  const py::gil_scoped_acquire gil;
  for (const auto& hook : node.tensor_pre_hooks()) {
    // By name: the type's own address may differ between libraries.
    if (std::string_view(typeid(*hook).name()).find("PyFunctionTensorPreHook") != std::string_view::npos) {
      std::string found = libraryIn(static_cast<torch::autograd::PyFunctionTensorPreHook&>(*hook).dict);
      if (!found.empty()) {
        return found;
      }
    }
  }
  return {};
}

}  // namespace xmesh::pipeline
