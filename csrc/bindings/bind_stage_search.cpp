#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/error.h"
#include "core/parallelism/operator_clustering.h"
#include "core/parallelism/stage_search.h"
#include "core/parallelism/submeshes.h"

namespace xmesh::bindings {
namespace {

namespace py = pybind11;
using Stage = std::tuple<size_t, size_t, size_t, size_t>;
using Part = std::tuple<size_t, size_t, size_t>;
using Devices = std::tuple<size_t, size_t, size_t, size_t>;

std::vector<core::HostClass> clusterOf(const std::vector<std::pair<size_t, size_t>>& classes) {
  std::vector<core::HostClass> out;
  for (const auto& [num_hosts, devices_per_host] : classes) {
    out.push_back({num_hosts, devices_per_host});
  }
  return out;
}

std::vector<Stage> stagesOf(const std::vector<core::ChosenStage>& stages) {
  std::vector<Stage> out;
  for (const core::ChosenStage& stage : stages) {
    out.emplace_back(stage.first_layer, stage.end_layer, stage.submesh, stage.option);
  }
  return out;
}

auto clusterOperators(const std::vector<std::pair<int64_t, std::vector<size_t>>>& operators,
                      const std::vector<std::pair<std::optional<size_t>, int64_t>>& values, size_t num_layers, double slack) {
  std::vector<core::ModelOperator> loads;
  for (const auto& [num_flops, reads] : operators) {
    loads.push_back({num_flops, reads});
  }
  std::vector<core::ModelValue> read;
  for (const auto& [maker, num_bytes] : values) {
    read.push_back({maker, num_bytes});
  }
  core::OperatorLayers found = core::clusterOperators(loads, read, num_layers, slack);
  return std::tuple(std::move(found.first_operators), found.max_received_bytes, found.flop_limit);
}

std::vector<std::vector<Part>> submeshShapes(const std::vector<std::pair<size_t, size_t>>& classes, bool powers_of_two, bool is_mixed) {
  const core::HostCounts counts = powers_of_two ? core::HostCounts::kPowersOfTwo : core::HostCounts::kAll;
  std::vector<std::vector<Part>> out;
  for (const core::Submesh& submesh : core::submeshShapes(clusterOf(classes), {counts, is_mixed})) {
    std::vector<Part>& parts = out.emplace_back();
    for (const core::SubmeshPart& part : submesh.parts) {
      parts.emplace_back(part.host_class, part.num_hosts, part.devices_per_host);
    }
  }
  return out;
}

std::optional<std::vector<std::vector<Devices>>> placeSubmeshes(const std::vector<std::pair<size_t, size_t>>& classes,
                                                                const std::vector<std::vector<Part>>& submeshes) {
  std::vector<core::Submesh> wanted;
  for (const std::vector<Part>& parts : submeshes) {
    core::Submesh& submesh = wanted.emplace_back();
    for (const auto& [host_class, num_hosts, devices_per_host] : parts) {
      submesh.parts.push_back({host_class, num_hosts, devices_per_host});
    }
  }
  const auto placed = core::placeSubmeshes(clusterOf(classes), wanted);
  if (!placed.has_value()) {
    return std::nullopt;
  }
  std::vector<std::vector<Devices>> out;
  for (const std::vector<core::HostDevices>& stage : *placed) {
    std::vector<Devices>& devices = out.emplace_back();
    for (const core::HostDevices& one : stage) {
      devices.emplace_back(one.host_class, one.host, one.first_device, one.num_devices);
    }
  }
  return out;
}

core::StageProblem makeProblem(size_t num_layers, size_t num_microbatches, std::vector<size_t> num_devices,
                               const std::vector<std::pair<std::vector<size_t>, int64_t>>& submeshes, std::vector<int64_t> in_flight) {
  core::StageProblem out{num_layers, num_microbatches, std::move(num_devices), {}, std::move(in_flight), {}, {}};
  for (const auto& [devices, memory_bytes] : submeshes) {
    out.submeshes.push_back({devices, memory_bytes});
  }
  return out;
}

void addOptions(core::StageProblem& problem, size_t submesh, const std::vector<double>& seconds, const std::vector<int64_t>& stage_bytes,
                const std::vector<int64_t>& bytes_per_microbatch) {
  const size_t count = problem.num_layers * problem.num_layers;
  core::require(seconds.size() == count && stage_bytes.size() == count && bytes_per_microbatch.size() == count,
                "options are one for each first and last layer");
  for (size_t first = 0; first < problem.num_layers; ++first) {
    for (size_t last = first; last < problem.num_layers; ++last) {
      const size_t at = first * problem.num_layers + last;
      problem.addOption(first, last, submesh, {seconds[at], stage_bytes[at], bytes_per_microbatch[at]});
    }
  }
}

/// Ctrl-C is heard while it searches.
bool hearsNothing() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
  return true;
}

void setEntering(core::StageProblem& problem, size_t submesh, const std::vector<double>& seconds) {
  core::require(submesh < problem.submeshes.size() && seconds.size() == problem.num_layers, "what enters takes seconds for each first layer");
  problem.entering.resize(problem.num_layers * problem.submeshes.size());
  for (size_t first = 0; first < problem.num_layers; ++first) {
    problem.entering[first * problem.submeshes.size() + submesh] = seconds[first];
  }
}

std::vector<std::tuple<double, bool, std::vector<Stage>>> bestPlans(core::StageProblem problem, size_t count,
                                                                    const std::function<bool(const std::vector<Stage>&)>& accepts,
                                                                    const std::function<bool()>& go_on, std::optional<size_t> num_stages) {
  core::StageSearchLimits limits;
  limits.least_stages = num_stages.value_or(1);
  problem.in_flight.resize(std::min(num_stages.value_or(problem.in_flight.size()), problem.in_flight.size()));
  limits.count = count;
  if (accepts) {
    limits.accepts = [&](const core::StagePlan& plan) {
      const py::gil_scoped_acquire gil;
      return accepts(stagesOf(plan.stages));
    };
  }
  limits.go_on = [&] {
    if (!go_on) {
      return hearsNothing();
    }
    const py::gil_scoped_acquire gil;
    return hearsNothing() && go_on();
  };
  std::vector<core::StagePlan> found;
  {
    const py::gil_scoped_release released;
    found = core::bestStagePlans(problem, limits);
  }
  std::vector<std::tuple<double, bool, std::vector<Stage>>> out;
  for (const core::StagePlan& plan : found) {
    out.emplace_back(plan.seconds, plan.is_proven, stagesOf(plan.stages));
  }
  return out;
}

}  // namespace

void bindStageSearch(py::module_& module) {
  module.def("cluster_operators", &clusterOperators, py::arg("operators"), py::arg("values"), py::arg("num_layers"), py::arg("slack"),
             py::call_guard<py::gil_scoped_release>(),
             "Operators (FLOPs, values that they read) and values (maker or None, bytes) cut into layers: (first operator of each, most bytes that "
             "one receives, FLOPs that none exceeds). Raises ValueError for fewer operators than layers.");
  module.def("submesh_shapes", &submeshShapes, py::arg("classes"), py::arg("powers_of_two") = false, py::arg("is_mixed") = false,
             "The shapes that stages may have on hosts of these classes (hosts, devices of each): lists of parts (class, hosts, devices of each).");
  module.def("place_submeshes", &placeSubmeshes, py::arg("classes"), py::arg("submeshes"),
             "The devices of each submesh: (class, host within it, first device, devices). None where they cannot be placed.");
  py::class_<core::StageProblem>(module, "StageProblem", "Layers to cut into stages, and what each would take on each submesh.")
      .def(py::init(&makeProblem), py::arg("num_layers"), py::arg("num_microbatches"), py::arg("num_devices"), py::arg("submeshes"),
           py::arg("in_flight"),
           "`num_devices` by class; a submesh is (devices of each class, bytes of a device); `in_flight` says how many microbatches a stage holds, "
           "by the number of stages behind it.")
      .def("add_options", &addOptions, py::arg("submesh"), py::arg("seconds"), py::arg("stage_bytes"), py::arg("bytes_per_microbatch"),
           "One more way to run each stretch of layers: lists by first and last layer, those with last before first unused.")
      .def("set_entering", &setEntering, py::arg("submesh"), py::arg("seconds"),
           "What the values that a stage reads, and their gradients, take on their way, by its first layer.")
      .def("best_plans", &bestPlans, py::arg("count"), py::arg("accepts") = nullptr, py::arg("go_on") = nullptr, py::arg("num_stages") = std::nullopt,
           "The cheapest ones, of any number of stages or of this one: (seconds, whether that is proven, stages (first layer, end, submesh, "
           "option)). The first is the best; see the C++ "
           "bestStagePlans.")
      .def(
          "smallest_memory",
          [](const core::StageProblem& problem) -> std::optional<std::tuple<int64_t, std::vector<Stage>, size_t>> {
            const auto found = core::smallestMemory(problem);
            if (!found.has_value()) {
              return std::nullopt;
            }
            return std::tuple(found->num_bytes, stagesOf(found->stages), found->largest_stage);
          },
          "The least bytes of a device that leave a plan, its stages, and which of them needs so much; None without any.");
}

}  // namespace xmesh::bindings
