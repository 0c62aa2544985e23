#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "c10d/link.h"
#include "core/weights/manifest.h"

namespace xmesh::bindings {

namespace py = pybind11;

namespace {

using c10d_backend::Link;
using c10d_backend::LinkOptions;
using Unlocked = py::call_guard<py::gil_scoped_release>;

using Settled = std::tuple<std::string, std::vector<std::string>, std::vector<std::string>>;

std::optional<Settled> waitSettled(Link& link, uint64_t version, std::chrono::milliseconds timeout) {
  c10d_backend::PublishedVersion settled;
  if (!link.waitSettled(version, timeout, settled)) {
    return std::nullopt;
  }
  return Settled(std::move(settled.error), std::move(settled.replicas), std::move(settled.left_out));
}

}  // namespace

void bindLink(py::module_& module) {
  py::class_<Link, std::shared_ptr<Link>>(module, "Link")
      .def(py::init([](const c10::intrusive_ptr<::c10d::Store>& store, bool is_source, std::string replica, int32_t rank, int32_t size,
                       std::chrono::milliseconds deadline, int64_t staging_bytes, int64_t wave_bytes) {
             LinkOptions options{is_source, std::move(replica), rank, size, deadline, staging_bytes, wave_bytes};
             return std::make_shared<Link>(store, std::move(options));
           }),
           py::arg("store"), py::arg("is_source"), py::arg("replica"), py::arg("rank"), py::arg("size"), py::arg("deadline"),
           py::arg("staging_bytes"), py::arg("wave_bytes"), Unlocked())
      .def(
          "enter",
          [](Link& self, const std::string& manifest, std::vector<std::vector<at::Tensor>> held, std::vector<at::Tensor> needed) {
            // Without Python's objects, and without gradients: the link's thread uses them.
            for (std::vector<at::Tensor>& boxes : held) {
              std::transform(boxes.begin(), boxes.end(), boxes.begin(), [](const at::Tensor& tensor) { return tensor.detach(); });
            }
            std::transform(needed.begin(), needed.end(), needed.begin(), [](const at::Tensor& tensor) { return tensor.detach(); });
            self.enter(core::manifestFromJson(manifest), {std::move(held), std::move(needed)});
          },
          py::arg("manifest"), py::arg("held"), py::arg("needed"), Unlocked())
      .def("publish", &Link::publish, py::arg("version"), Unlocked())
      .def("wait_settled", &waitSettled, py::arg("version"), py::arg("timeout"), Unlocked())
      .def("receive", &Link::receive, py::arg("timeout"), Unlocked())
      .def("swap", &Link::swap, Unlocked())
      .def("resume", &Link::resume, Unlocked())
      .def_property_readonly("has_source", &Link::hasSource)
      .def("close", &Link::close, Unlocked());
}

}  // namespace xmesh::bindings
