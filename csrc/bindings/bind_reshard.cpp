#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "bindings/bindings.h"
#include "c10d/movement.h"
#include "c10d/process_group_xmesh.h"
#include "c10d/reshard_group.h"
#include "core/error.h"
#include "runtime/failure.h"
#include "runtime/memory/shared_memory.h"

namespace py = pybind11;

namespace xmesh::bindings {
namespace {

using c10d_backend::ProcessGroupXmesh;
using c10d_backend::ReshardGroup;
using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

py::object errors() { return py::module_::import("torch_xmesh.errors"); }

void raisePeerError(const char* text, const std::vector<int64_t>& ranks) {
  const py::object type = errors().attr("PeerError");
  const py::object instance = type(text, ranks);
  PyErr_SetObject(type.ptr(), instance.ptr());
}

/// A failure whose Python class torch finds, too. Torch hands calls' exceptions to Python in many ways (Work.wait, futures, operators, backwards), of
/// which pybind's translators see few. Has no Python object in it: threads of the network make and drop it.
class PythonFailure final : public torch::PyTorchError {
 public:
  explicit PythonFailure(runtime::Failure failure) : PyTorchError(failure.text), failure_(std::move(failure)) {}
  [[nodiscard]] const runtime::Failure& failure() const { return failure_; }
  /// Torch makes the exception of its text alone. It asks where it has caught this one, so that nothing may be thrown.
  PyObject* python_type() override {
    if (failure_.kind == runtime::FailureKind::kMistake) {
      return PyExc_ValueError;
    }
    try {
      errors().attr("note_ranks")(torch::processErrorMsg(failure_.text), failure_.blamed_ranks);
      return errors().attr("PeerError").ptr();  // its module holds it
    } catch (const std::exception&) {           // Python ends
      PyErr_Clear();
      return PyExc_RuntimeError;
    }
  }

 private:
  const runtime::Failure failure_;
};

/// StageError and GroupError come from this module's own functions alone, whose exceptions `translate` sees.
void throwForPython(const runtime::Failure& failure) {
  if (failure.kind == runtime::FailureKind::kPeer || failure.kind == runtime::FailureKind::kMistake) {
    throw PythonFailure(failure);
  }
}

void raiseStageError(const runtime::StageError& error) {
  const py::object type = errors().attr("StageError");
  const py::object instance = type(error.what(), error.stage(), error.microbatch());
  PyErr_SetObject(type.ptr(), instance.ptr());
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) {
      std::rethrow_exception(pointer);
    }
  } catch (const PythonFailure& error) {
    if (error.failure().kind == runtime::FailureKind::kPeer) {
      raisePeerError(error.what(), error.failure().blamed_ranks);
    } else {
      PyErr_SetString(PyExc_ValueError, error.what());
    }
  } catch (const runtime::PeerError& error) {
    raisePeerError(error.what(), error.globalRanks());
  } catch (const runtime::StageError& error) {
    raiseStageError(error);
  } catch (const core::InvalidArgument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const runtime::GroupError& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

std::shared_ptr<ReshardGroup> reshardGroupOf(const c10::intrusive_ptr<ProcessGroupXmesh>& group, std::vector<int64_t> global_ranks) {
  const auto attached = std::dynamic_pointer_cast<ReshardGroup>(group->attachment().getOrMake([&] {
    const c10d_backend::XmeshOptions& given = group->options();
    c10d_backend::ReshardGroupOptions options{given.staging_bytes, given.pacing, given.shared_memory, given.host_id, given.blocking_wait};
    options.make_inner = c10d_backend::ownInnerFactory(group->hooks(), given);
    return std::make_shared<ReshardGroup>(group->store(), group->getRank(), std::move(global_ranks), group->timeout(), std::move(options));
  }));
  if (attached == nullptr) {
    throw runtime::GroupError("the process group is closed: no reshard can start on it");
  }
  attached->setTimeout(group->timeout());
  return attached;
}

}  // namespace

void bindReshard(py::module_& module) {
  py::register_exception_translator(&translate);
  runtime::setThrowing(&throwForPython);
  py::class_<runtime::PreparedPlan, std::shared_ptr<runtime::PreparedPlan>>(module, "PreparedPlan")
      .def_property_readonly("participants", [](const runtime::PreparedPlan& self) { return self.terms.participants.ranks; });
  const py::class_<runtime::CallKey> call_key(module, "CallKey");
  py::class_<ReshardGroup, std::shared_ptr<ReshardGroup>>(module, "ReshardGroup")
      .def_property_readonly("global_rank", &ReshardGroup::globalRank)
      .def_property_readonly("peak_staging_bytes", &ReshardGroup::peakStagingBytes)
      .def_property("timeout", &ReshardGroup::timeout, &ReshardGroup::setTimeout)
      .def("topology", &ReshardGroup::topology, py::arg("ranks"), py::arg("links"), py::call_guard<py::gil_scoped_release>())
      .def(
          "prepare",
          [](const ReshardGroup& self, std::shared_ptr<core::ReshardingPlan> plan, std::string requires_grad, bool is_backward,
             std::vector<std::string> labels, runtime::CallFields entries, std::vector<std::pair<std::string, std::string>> devices,
             bool through_host) {
            return std::const_pointer_cast<runtime::PreparedPlan>(self.prepare(
                std::move(plan), {std::move(requires_grad), is_backward, std::move(labels), std::move(devices), std::move(entries), through_host}));
          },
          py::arg("plan"), py::arg("requires_grad"), py::arg("is_backward"), py::arg("labels") = std::vector<std::string>(),
          py::arg("entries") = runtime::CallFields(), py::arg("devices") = std::vector<std::pair<std::string, std::string>>(),
          py::arg("through_host") = false, py::call_guard<py::gil_scoped_release>())
      .def(
          "begin",
          [](ReshardGroup& self, const std::shared_ptr<runtime::PreparedPlan>& prepared, std::vector<at::Tensor> src, std::vector<at::Tensor> dst,
             const std::optional<runtime::CallKey>& forward, bool is_detached,
             bool writes_once_agreed) { return self.begin(prepared, std::move(src), std::move(dst), {forward, is_detached, writes_once_agreed}); },
          py::arg("prepared"), py::arg("src"), py::arg("dst"), py::arg("forward"), py::arg("is_detached"), py::arg("writes_once_agreed"),
          py::call_guard<py::gil_scoped_release>())
      .def("refuse", &ReshardGroup::refuse, py::arg("participants"), py::arg("text"), py::call_guard<py::gil_scoped_release>())
      .def("refuse_unnamed", &ReshardGroup::refuseUnnamed, py::arg("ranks"), py::arg("text"), py::call_guard<py::gil_scoped_release>())
      .def(
          "refuse_pipeline",
          [](ReshardGroup& self, std::vector<int64_t> ranks, const std::string& text, bool is_mistake) {
            self.refusePipeline(std::move(ranks), {is_mistake ? runtime::FailureKind::kMistake : runtime::FailureKind::kStage, text, {}});
          },
          py::arg("ranks"), py::arg("text"), py::arg("is_mistake"), py::call_guard<py::gil_scoped_release>())
      .def("close", &ReshardGroup::close, py::arg("abort"), py::call_guard<py::gil_scoped_release>());
  module.def("reshard_group", &reshardGroupOf, py::arg("group"), py::arg("global_ranks"), py::call_guard<py::gil_scoped_release>(),
             "The reshards of a process group on xmesh, made at the first call. `global_ranks` are those of its group ranks, in order.");
  module.def(
      "shared_memory",
      [](const std::vector<at::Tensor>& written, const std::vector<at::Tensor>& read) {
        std::vector<runtime::TensorMemory> all;
        for (const std::vector<at::Tensor>* tensors : {&written, &read}) {
          for (const at::Tensor& one : *tensors) {
            const int64_t device = (int64_t{static_cast<int8_t>(one.device().type())} << 8) + one.device().index();
            all.push_back({c10d_backend::plainMemoryOf(one), one.element_size(), device, tensors == &written});
          }
        }
        return runtime::findSharedMemory(all);
      },
      py::arg("written"), py::arg("read"));
  module.def(
      "call_key",
      [](const WorkPtr& work) {
        const std::shared_ptr<runtime::ReshardCall> call = c10d_backend::callOf(work);
        core::require(call != nullptr, "not the Work of a reshard");
        return call->key();
      },
      py::arg("work"));
}

}  // namespace xmesh::bindings
