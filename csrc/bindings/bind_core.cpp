#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "core/error.h"
#include "core/resharding/fingerprint.h"
#include "core/resharding/lower_bound.h"
#include "core/resharding/plan_json.h"
#include "core/resharding/plan_resharding.h"
#include "core/resharding/plan_text.h"
#include "core/resharding/simulate.h"
#include "core/resharding/strategy.h"
#include "core/resharding/strategy_registry.h"
#include "core/spec.h"
#include "core/tiling.h"
#include "core/topology.h"

namespace py = pybind11;

namespace xmesh::bindings {
namespace {

using core::LinkModel;
using core::ReshardingPlan;
using core::TensorSpec;
using core::Topology;
using PlanPtr = std::shared_ptr<ReshardingPlan>;

TensorSpec makeSpec(std::vector<int64_t> shape, const std::string& dtype, std::vector<int64_t> mesh_shape, std::vector<int64_t> mesh_ranks,
                    const std::vector<std::string>& placements) {
  TensorSpec spec{std::move(shape), core::DType::parse(dtype), core::Mesh(std::move(mesh_shape), std::move(mesh_ranks)), {}};
  for (const std::string& placement : placements) {
    spec.placements.push_back(core::Placement::parse(placement));
  }
  spec.validate();
  return spec;
}

std::vector<std::string> placementTexts(const TensorSpec& spec) {
  std::vector<std::string> out;
  for (const core::Placement& placement : spec.placements) {
    out.push_back(placement.str());
  }
  return out;
}

/// Local shape on a global rank; nothing outside the mesh.
std::optional<std::vector<int64_t>> localShape(const TensorSpec& spec, int64_t global_rank) {
  const int64_t index = spec.mesh.indexOfRank(global_rank);
  return index < 0 ? std::nullopt : std::optional(core::Tiling(spec).localShape(spec.mesh.coordOfIndex(index)));
}

/// (host, host, start, end) of every message, seconds; from == to for a message inside a host.
std::vector<std::tuple<int64_t, int64_t, double, double>> lanes(const ReshardingPlan& plan) {
  const core::SimulatedPlan simulated = core::simulatePlan(plan);
  std::vector<std::tuple<int64_t, int64_t, double, double>> out;
  for (size_t i = 0; i < plan.messages.size(); ++i) {
    out.emplace_back(plan.topology.hostOf(plan.messages[i].src_rank), plan.topology.hostOf(plan.messages[i].dst_rank), simulated.start_s[i],
                     simulated.end_s[i]);
  }
  return out;
}

void bindValues(py::module_& module) {
  py::class_<TensorSpec>(module, "TensorSpec")
      .def(py::init(&makeSpec), py::arg("shape"), py::arg("dtype"), py::arg("mesh_shape"), py::arg("mesh_ranks"), py::arg("placements"))
      .def_property_readonly("shape", [](const TensorSpec& self) { return self.shape; })
      .def_property_readonly("dtype", [](const TensorSpec& self) { return self.dtype.name; })
      .def_property_readonly("mesh_shape", [](const TensorSpec& self) { return self.mesh.shape(); })
      .def_property_readonly("mesh_ranks", [](const TensorSpec& self) { return self.mesh.ranks(); })
      .def_property_readonly("placements", &placementTexts)
      .def_property_readonly("num_bytes", &TensorSpec::numBytes)
      .def("local_shape", &localShape, py::arg("global_rank"))
      .def("__eq__", [](const TensorSpec& self, const TensorSpec& other) { return self == other; })
      .def("__repr__", &TensorSpec::str);
  py::class_<LinkModel>(module, "LinkModel")
      .def(py::init<>())
      .def_readwrite("nic_bytes_per_s", &LinkModel::nic_bytes_per_s)
      .def_readwrite("local_bytes_per_s", &LinkModel::local_bytes_per_s)
      .def_readwrite("latency_us", &LinkModel::latency_us)
      .def_readwrite("message_us", &LinkModel::message_us)
      .def_readwrite("local_latency_us", &LinkModel::local_latency_us)
      .def_readwrite("is_measured", &LinkModel::is_measured);
  py::class_<Topology>(module, "Topology")
      .def(py::init<std::map<int64_t, int64_t>, LinkModel, std::map<int64_t, int64_t>>(), py::arg("host_of"), py::arg("links"),
           py::arg("nic_of_host"))
      .def_property_readonly("host_of", &Topology::hostOfRanks)
      .def_property_readonly("links", &Topology::links)
      .def_property_readonly("nic_of_host", &Topology::nicOfHosts)
      .def("__eq__", [](const Topology& self, const Topology& other) { return self == other; });
}

void bindPlan(py::module_& module) {
  py::class_<ReshardingPlan, PlanPtr>(module, "ReshardingPlan")
      .def_static(
          "from_json", [](const std::string& text) { return std::make_shared<ReshardingPlan>(core::planFromJson(text)); }, py::arg("text"),
          py::call_guard<py::gil_scoped_release>())
      .def("to_json", &core::planToJson)
      .def("text", &core::planStr, py::arg("max_messages") = 8)
      .def("fingerprint", &core::planFingerprint)
      .def("lanes", &lanes, py::call_guard<py::gil_scoped_release>())
      .def("bytes_sent", &ReshardingPlan::bytesSent)
      .def("bytes_received", &ReshardingPlan::bytesReceived)
      .def_property_readonly("participants", &ReshardingPlan::participants)
      .def_readonly("strategy", &ReshardingPlan::strategy)
      .def_readonly("topology", &ReshardingPlan::topology)
      .def_readonly("lower_bound_bytes", &ReshardingPlan::lower_bound_bytes)
      .def_readonly("lower_bound_seconds", &ReshardingPlan::lower_bound_seconds)
      .def_readonly("predicted_seconds", &ReshardingPlan::predicted_seconds)
      .def_property_readonly("num_messages", [](const ReshardingPlan& self) { return self.messages.size(); })
      .def_property_readonly("num_tasks", [](const ReshardingPlan& self) { return self.tasks.size(); })
      .def_property_readonly("tensors", [](const ReshardingPlan& self) {
        std::vector<std::pair<TensorSpec, TensorSpec>> out;
        for (const core::TensorPair& pair : self.tensors) {
          out.emplace_back(pair.src, pair.dst);
        }
        return out;
      });
  module.def(
      "plan_resharding",
      [](const std::vector<std::pair<TensorSpec, TensorSpec>>& tensors, const Topology& topology, const std::string& strategy) {
        std::vector<core::TensorPair> pairs;
        for (const auto& [src, dst] : tensors) {
          pairs.push_back({src, dst});
        }
        return std::make_shared<ReshardingPlan>(core::planResharding(std::move(pairs), topology, core::parseStrategy(strategy)));
      },
      py::arg("tensors"), py::arg("topology"), py::arg("strategy"), py::call_guard<py::gil_scoped_release>());
  module.def("canonical_strategy", [](const std::string& text) { return core::parseStrategy(text).str(); }, py::arg("text"));
  module.def("strategy_names", [] {
    std::vector<std::string> names;
    for (const core::StrategyInfo& info : core::strategies()) {
      names.emplace_back(info.name);
    }
    return names;
  });
}

}  // namespace

void bindCore(py::module_& module) {
  bindValues(module);
  bindPlan(module);
}

}  // namespace xmesh::bindings
