#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "core/pipeline/choose_schedule.h"
#include "core/pipeline/generators.h"
#include "core/pipeline/segment_order.h"
#include "core/pipeline/simulate.h"
#include "core/pipeline/validate.h"

namespace py = pybind11;

namespace xmesh::bindings {

namespace {

using core::Action;
using core::Schedule;
using core::StageEdge;
using SchedulePtr = std::shared_ptr<Schedule>;

/// From, to, has_gradient.
using EdgeTuple = std::tuple<int32_t, int32_t, bool>;
/// Seconds, bytes.
using TransferTuple = std::tuple<double, int64_t>;

std::vector<std::string> actionsOf(const Schedule& schedule, int32_t place) {
  std::vector<std::string> out;
  for (const Action& action : schedule.actionsOf(place)) {
    out.push_back(schedule.textOf(action));
  }
  return out;
}

/// By stage, how many segments.
std::vector<int32_t> segmentsOf(const Schedule& schedule) {
  return schedule.segments.isDivided() ? schedule.segments.counts() : std::vector<int32_t>(static_cast<size_t>(schedule.num_stages), 1);
}

/// By stage.
std::vector<int32_t> placesOf(const Schedule& schedule) {
  std::vector<int32_t> out;
  for (size_t stage = 0; stage < segmentsOf(schedule).size(); ++stage) {
    out.push_back(schedule.place_of_stage[static_cast<size_t>(schedule.segments.firstOf(static_cast<int32_t>(stage)))]);
  }
  return out;
}

std::vector<StageEdge> edgesOf(const std::vector<EdgeTuple>& tuples) {
  std::vector<StageEdge> edges;
  for (const auto& [from, to, has_gradient] : tuples) {
    edges.push_back({from, to, has_gradient});
  }
  return edges;
}

core::TransferCost transferOf(const TransferTuple& tuple) { return {std::get<0>(tuple), std::get<1>(tuple)}; }

py::dict resultOf(const Schedule& schedule, const core::SimulatedSchedule& simulated) {
  py::list actions;
  for (const core::ActionSpan& span : simulated.actions) {
    actions.append(py::make_tuple(span.place, schedule.textOf(span.action), span.start_s, span.end_s));
  }
  py::list transfers;
  for (const core::TransferSpan& span : simulated.transfers) {
    const int32_t from = schedule.segments.stageOf(span.from_stage);
    const int32_t to = schedule.segments.stageOf(span.to_stage);
    const auto within = std::pair(span.from_stage - schedule.segments.firstOf(from), span.to_stage - schedule.segments.firstOf(to));
    transfers.append(py::make_tuple(from, to, span.microbatch, span.ready_s, span.start_s, span.end_s, within));
  }
  py::dict out;
  out["makespan_s"] = simulated.makespan_s;
  out["bubble_fraction"] = simulated.bubbleFraction();
  out["busy_s"] = simulated.busy_s;
  out["peak_in_flight"] = simulated.peak_in_flight;
  out["actions"] = actions;
  out["transfers"] = transfers;
  return out;
}

/// F, B, I, W seconds; bytes held from F to I, from I to W, and anyway; seconds of sums at the end.
using StageTuple = std::tuple<double, double, double, double, int64_t, int64_t, int64_t, double>;
/// The edge, what its values and their gradients take, and whether they do on one place, too.
using EdgeCostTuple = std::tuple<EdgeTuple, TransferTuple, TransferTuple, bool>;

core::ScheduleCosts costsOf(const std::vector<StageTuple>& stages, const std::vector<EdgeCostTuple>& edges, double nic_bytes_per_s, double latency_s,
                            bool overlap, bool blocks_receiver, std::vector<uint8_t> runs_weights_early, double noise, uint64_t noise_seed,
                            std::vector<int32_t> weights_group, std::vector<uint8_t> is_on_one_host) {
  core::ScheduleCosts costs;
  for (const auto& [forward, backward, input, weight, activation_bytes, weight_bytes, fixed_bytes, sums] : stages) {
    costs.stages.push_back({forward, backward, input, weight, activation_bytes, weight_bytes, fixed_bytes, sums});
  }
  for (const auto& [edge, forward, backward, is_resharded] : edges) {
    costs.edges.push_back({edgesOf({edge})[0], transferOf(forward), transferOf(backward), is_resharded});
  }
  costs.nic_bytes_per_s = nic_bytes_per_s;
  costs.latency_s = latency_s;
  costs.overlap = overlap;
  costs.blocks_receiver = blocks_receiver;
  costs.runs_weights_early = std::move(runs_weights_early);
  costs.noise = noise;
  costs.noise_seed = noise_seed;
  costs.weights_group = std::move(weights_group);
  costs.is_on_one_host = std::move(is_on_one_host);
  return costs;
}

py::dict simulate(const Schedule& schedule, const core::ScheduleCosts& costs) {
  core::SimulatedSchedule simulated;
  std::vector<int64_t> peak_bytes;
  {
    const py::gil_scoped_release no_gil;
    simulated = core::simulateSchedule(schedule, costs);
    peak_bytes = core::peakBytes(schedule, costs);
  }
  py::dict out = resultOf(schedule, simulated);
  out["peak_bytes"] = peak_bytes;
  return out;
}

/// The best candidate's index or -1, and of each: its schedule, simulated seconds, their mean with noise, whether W runs early, peak bytes by place.
py::tuple chooseSchedule(const core::ScheduleCosts& costs, std::vector<int32_t> place_of_stage, int32_t num_microbatches,
                         std::optional<int64_t> memory_limit_bytes, const std::vector<int32_t>& segments) {
  core::ScheduleChoice choice;
  {
    const py::gil_scoped_release no_gil;
    choice = core::chooseSchedule({costs, std::move(place_of_stage), num_microbatches, memory_limit_bytes, core::Segments(segments)});
  }
  py::list candidates;
  for (core::ScheduleCandidate& candidate : choice.candidates) {
    candidates.append(py::make_tuple(std::make_shared<Schedule>(std::move(candidate.schedule)), candidate.step_s, candidate.noisy_s,
                                     candidate.runs_weights_early, candidate.peak_bytes));
  }
  return py::make_tuple(choice.best, candidates);
}

}  // namespace

void bindPipelineCore(py::module_& module) {
  py::class_<Schedule, SchedulePtr>(module, "Schedule")
      .def_readonly("name", &Schedule::name)
      .def_property_readonly("num_stages", [](const Schedule& self) { return segmentsOf(self).size(); })
      .def_property_readonly("num_segments", &segmentsOf)
      .def_readonly("num_microbatches", &Schedule::num_microbatches)
      .def_property_readonly("place_of_stage", &placesOf)
      .def_property_readonly("num_places", &Schedule::numPlaces)
      .def("actions", &actionsOf, py::arg("place"))
      .def_property_readonly("peak_in_flight", &core::peakInFlight)
      .def("to_csv", &core::scheduleToCsv)
      .def(
          "validate",
          [](const Schedule& self, const std::vector<EdgeTuple>& edges, bool is_forward_only) {
            core::validateSchedule(self, core::edgesOfSegments(self.segments, edgesOf(edges)), {is_forward_only});
          },
          py::arg("edges"), py::arg("is_forward_only") = false, py::call_guard<py::gil_scoped_release>())
      .def(
          "refuse_cell",
          [](const Schedule& self, int32_t place, int32_t cell, const std::string& message) { core::refuseCell(self, {place, cell}, message); },
          py::arg("place"), py::arg("cell"), py::arg("message"))
      .def("forwards", &core::forwardsOf)
      .def(
          "divided",
          [](const Schedule& self, const std::vector<int32_t>& segments) {
            return std::make_shared<Schedule>(core::dividedInto(self, core::Segments(segments)));
          },
          py::arg("segments"))
      .def("__eq__", [](const Schedule& self, const Schedule& other) { return self == other; })
      .def("__str__", &Schedule::str);
  module.def("make_schedule", &core::makeSchedule, py::arg("name"), py::arg("num_stages"), py::arg("num_microbatches"),
             py::arg("place_of_stage") = std::vector<int32_t>(), py::call_guard<py::gil_scoped_release>());
  module.def("schedule_names", &core::scheduleNames);
  module.def("schedule_from_csv", &core::scheduleFromCsv, py::arg("text"), py::arg("name") = "csv", py::call_guard<py::gil_scoped_release>());
  py::class_<core::ScheduleCosts>(module, "ScheduleCosts")
      .def(py::init(&costsOf), py::arg("stages"), py::arg("edges"), py::arg("nic_bytes_per_s"), py::arg("latency_s"), py::arg("overlap"),
           py::arg("blocks_receiver"), py::arg("runs_weights_early"), py::arg("noise"), py::arg("noise_seed"),
           py::arg("weights_group") = std::vector<int32_t>(), py::arg("is_on_one_host") = std::vector<uint8_t>());
  module.def("simulate_schedule", &simulate, py::arg("schedule"), py::arg("costs"));
  module.def("choose_schedule", &chooseSchedule, py::arg("costs"), py::arg("place_of_stage"), py::arg("num_microbatches"),
             py::arg("memory_limit_bytes"), py::arg("segments") = std::vector<int32_t>());
  module.def(
      "duplex",
      [](std::vector<int32_t> place_of_stage, int32_t num_microbatches, const std::vector<int32_t>& segments) {
        const core::PipelineShape shape{static_cast<int32_t>(place_of_stage.size()), num_microbatches, std::move(place_of_stage)};
        return std::make_shared<Schedule>(core::duplex(shape, core::Segments(segments)));
      },
      py::arg("place_of_stage"), py::arg("num_microbatches"), py::arg("segments"));
}

}  // namespace xmesh::bindings
