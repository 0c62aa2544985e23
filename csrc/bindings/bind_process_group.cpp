#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/python_objects.h"
#include "c10d/life_lines.h"
#include "c10d/live_groups.h"
#include "c10d/process_group_xmesh.h"
#include "transport/local_address.h"

namespace xmesh::bindings {
namespace {

namespace py = pybind11;
using c10d_backend::HostHooks;
using c10d_backend::ProcessGroupXmesh;
using c10d_backend::XmeshOptions;

void runUnlocked(const std::function<void()>& function) {
  if (interpreterIsThere() && PyGILState_Check() != 0) {
    const py::gil_scoped_release unlocked;
    function();
  } else {
    function();
  }
}

HostHooks hostHooks(py::object make_inner, const std::vector<std::string>& accelerators) {
  HostHooks hooks;
  auto callable = holdCallable(std::move(make_inner));
  hooks.make_inner = [callable](c10::DeviceType kind, const c10::intrusive_ptr<::c10d::Store>& store, int rank, int size,
                                const c10::intrusive_ptr<XmeshOptions>& options) {
    const py::gil_scoped_acquire locked;
    return (*callable)(c10::DeviceTypeName(kind, /*lower_case=*/true), store, rank, size, options).cast<c10::intrusive_ptr<::c10d::Backend>>();
  };
  hooks.run_unlocked = runUnlocked;
  for (const std::string& kind : accelerators) {
    hooks.accelerators.push_back(at::Device(kind).type());
  }
  return hooks;
}

}  // namespace

void bindProcessGroup(py::module_& module) {
  py::module_::import("torch.distributed");
  module.def("end_live_groups", &c10d_backend::endLiveGroups, "Ends the groups on xmesh that are left; for the end of the interpreter.",
             py::arg("has_failed"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "address_towards", [](const c10::intrusive_ptr<::c10d::Store>& store) { return transport::knownAddress(c10d_backend::storeHost(store)); },
      "The IPv4 address that the other ranks of a store reach this host by, which reshards use; None where it is not known.", py::arg("store"),
      py::call_guard<py::gil_scoped_release>());
  py::class_<ProcessGroupXmesh, ::c10d::Backend, c10::intrusive_ptr<ProcessGroupXmesh>> group(
      module, "ProcessGroupXmesh",
      "The c10d backend ``xmesh``: gloo carries cpu tensors, NCCL cuda tensors, and those of another accelerator what ``Options.inner`` names.");

  py::class_<XmeshOptions, ::c10d::Backend::Options, c10::intrusive_ptr<XmeshOptions>>(
      group, "Options", "Options of a group on xmesh; ``gloo`` and ``nccl`` are handed to the inner backends.")
      .def(py::init([](std::chrono::milliseconds timeout) { return c10::make_intrusive<XmeshOptions>(timeout); }),
           py::arg("timeout") = c10d_backend::kDefaultTimeout)
      .def_readwrite("gloo", &XmeshOptions::gloo)
      .def_readwrite("nccl", &XmeshOptions::nccl)
      .def_readwrite("inner", &XmeshOptions::inner,
                     "Which c10d backend carries a kind of accelerator: ``{\"xpu\": \"xccl\"}``. That of cuda is nccl unless said otherwise.")
      .def_readwrite("blocking_wait", &XmeshOptions::blocking_wait,
                     "On an accelerator, wait() of a reshard blocks the host until the device is done, as with TORCH_NCCL_BLOCKING_WAIT=1.")
      .def_readwrite("staging_bytes", &XmeshOptions::staging_bytes, "Most memory per rank that reshards may stage messages in, in bytes.")
      .def_readwrite("pacing", &XmeshOptions::pacing, "Pace reshards' direct sends to their planned rates where rates were measured.")
      .def_readwrite("shared_memory", &XmeshOptions::shared_memory,
                     "Reshard between ranks at one address through shared memory where that can be had.")
      .def_readwrite("host_id", &XmeshOptions::host_id, "Which host this rank is on; empty for XMESH_HOST_ID or what is discovered.")
      .def("__copy__", [](const XmeshOptions& self) { return c10::make_intrusive<XmeshOptions>(self); })
      .def("__deepcopy__", [](const XmeshOptions& self, const py::object&) { return c10::make_intrusive<XmeshOptions>(self); }, py::arg("memo"));

  group
      .def(py::init([](const c10::intrusive_ptr<::c10d::Store>& store, int rank, int size, const c10::intrusive_ptr<XmeshOptions>& options,
                       py::object make_inner, const std::vector<std::string>& accelerators) {
             HostHooks hooks = hostHooks(std::move(make_inner), accelerators);
             const py::gil_scoped_release unlocked;
             return c10d_backend::noteLive(c10::make_intrusive<ProcessGroupXmesh>(store, rank, size, options, std::move(hooks)));
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"), py::arg("make_inner"), py::arg("accelerators"))
      .def("carries", &ProcessGroupXmesh::carries, py::arg("device"), "Whether tensors on a device of this kind can be moved here.")
      .def_property_readonly("store", &ProcessGroupXmesh::store, "The store of this group's own keys.")
      .def_property_readonly("options", &ProcessGroupXmesh::getBackendOptions, "The group's live options.")
      .def_property_readonly("timeout", &ProcessGroupXmesh::timeout)
      .def_property_readonly("global_ranks", &ProcessGroupXmesh::globalRanks, "Global rank of every group rank; empty for the default group.")
      .def_property_readonly("is_closed", &ProcessGroupXmesh::isClosed, "True after abort() or shutdown().")
      .def(
          "inner_backend", [](ProcessGroupXmesh& self, const at::Device& device) { return self.innerBackend(device.type()); }, py::arg("device"),
          "The inner backend that carries tensors of the device's kind, made if need be.", py::call_guard<py::gil_scoped_release>())
      .def("_set_default_timeout", &ProcessGroupXmesh::setTimeout, py::arg("timeout"), py::call_guard<py::gil_scoped_release>())
      // c10d calls this on the ranks outside a new group when the default group is bound to a device. xmesh's new groups never split a parent's
      // communicator, so there is nothing to take part in.
      .def("perform_nocolor_split", [](ProcessGroupXmesh&, const at::Device&) {}, py::arg("device"));
}

}  // namespace xmesh::bindings
