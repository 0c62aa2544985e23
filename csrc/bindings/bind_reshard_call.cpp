#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/normal_form.h"
#include "bindings/without_gil.h"

namespace py = pybind11;

namespace xmesh::bindings {
namespace {

/// Makes the DTensors that a call fills, anew each time.
class ResultMaker {
 public:
  struct Result {
    std::vector<int64_t> local_shape;
    at::ScalarType dtype;
    at::Device device;
    py::object spec;  ///< a DTensorSpec
  };

  explicit ResultMaker(std::vector<Result> results)
      : results_(std::move(results)),
        dtensor_(py::module_::import("torch.distributed.tensor").attr("DTensor")),
        make_(dtensor_.attr("__new__")),
        keywords_(py::make_tuple("requires_grad")) {}

  /// The local tensors, and the DTensors around them.
  [[nodiscard]] std::pair<std::vector<at::Tensor>, py::list> make() const {
    std::vector<at::Tensor> locals;
    locals.reserve(results_.size());
    withoutGil([&] {  // it may wait for a device
      for (const Result& result : results_) {
        locals.push_back(at::empty(result.local_shape, at::TensorOptions().dtype(result.dtype).device(result.device)));
      }
    });
    py::list out(results_.size());
    for (size_t i = 0; i < results_.size(); ++i) {
      const auto local = py::reinterpret_steal<py::object>(THPVariable_Wrap(locals[i]));
      PyObject* const arguments[] = {dtensor_.ptr(), local.ptr(), results_[i].spec.ptr(), Py_False};
      PyObject* const made = PyObject_Vectorcall(make_.ptr(), arguments, 3, keywords_.ptr());
      if (made == nullptr) {
        throw py::error_already_set();
      }
      PyList_SET_ITEM(out.ptr(), static_cast<Py_ssize_t>(i), made);
    }
    return {std::move(locals), std::move(out)};
  }

 private:
  const std::vector<Result> results_;
  const py::object dtensor_, make_;
  const py::tuple keywords_;
};

/// A DTensor's local tensor, with its bytes in it; an empty one for a spec.
at::Tensor localTensor(const py::handle& dtensor) {
  if (!THPVariable_Check(dtensor.ptr())) {
    return at::empty({0}, at::kCPU);
  }
  static PyObject* const name = PyUnicode_InternFromString("_local_tensor");
  const auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(dtensor.ptr(), name));
  if (!found) {
    throw py::error_already_set();
  }
  if (THPVariable_CheckExact(found.ptr())) {
    return THPVariable_Unpack(found.ptr());
  }
  const py::object settled = py::hasattr(found, "trigger_wait") ? found.attr("trigger_wait")() : found;  // an AsyncCollectiveTensor
  return settled.cast<at::Tensor>();
}

}  // namespace

void bindReshardCall(py::module_& module) {
  py::class_<NormalForm>(module, "NormalForm")
      .def_property_readonly("key", [](const NormalForm& self) { return py::bytes(self.key); })
      .def_readonly("leaves", &NormalForm::leaves)
      .def_readonly("outs", &NormalForm::outs);
  py::class_<NormalForms>(module, "NormalForms")
      .def(py::init<>())
      .def("of", &NormalForms::of, py::arg("xs"), py::arg("dst_mesh"), py::arg("dst_placements"), py::arg("out"), py::arg("options"),
           py::arg("with_grad"));
  py::class_<ResultMaker>(module, "ResultMaker")
      .def(py::init([](const std::vector<std::tuple<std::vector<int64_t>, py::object, std::string, py::object>>& given) {
             std::vector<ResultMaker::Result> results;
             for (const auto& [local_shape, dtype, device, spec] : given) {
               results.push_back({local_shape, reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type, at::Device(device), spec});
             }
             return ResultMaker(std::move(results));
           }),
           py::arg("results"))
      .def("make", &ResultMaker::make);
  module.def(
      "local_tensors",
      [](const std::vector<py::object>& dtensors) {
        std::vector<at::Tensor> out;
        out.reserve(dtensors.size());
        for (const py::object& dtensor : dtensors) {
          out.push_back(localTensor(dtensor));
        }
        return out;
      },
      py::arg("dtensors"));
  module.def("rebuilt", &rebuilt, py::arg("container"), py::arg("leaves"));
}

}  // namespace xmesh::bindings
