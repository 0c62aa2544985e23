#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "bindings/python_objects.h"
#include "bindings/without_gil.h"
#include "core/error.h"
#include "core/pipeline/schedule.h"
#include "pipeline/place.h"
#include "pipeline/traffic.h"

namespace py = pybind11;

namespace xmesh::bindings {
namespace {

using pipeline::EdgePlans;
using pipeline::EdgeValues;
using pipeline::ForwardResult;
using pipeline::PipelinePlace;
using pipeline::PipelineTraffic;
using pipeline::StageValues;
using runtime::PreparedPlan;

using Release = py::call_guard<py::gil_scoped_release>;
using Plans = std::vector<std::shared_ptr<PreparedPlan>>;

pipeline::StepInputs::Forward forwardOf(py::object function) {
  return [function = holdCallable(std::move(function))](int32_t stage, int32_t microbatch, std::vector<at::Tensor> inputs) {
    const py::gil_scoped_acquire gil;
    auto [outputs, loss] = (*function)(stage, microbatch, std::move(inputs)).cast<std::pair<std::vector<at::Tensor>, std::optional<at::Tensor>>>();
    return ForwardResult{std::move(outputs), std::move(loss)};
  };
}

pipeline::StepInputs::WeightsDone weightsDoneOf(py::object function) {
  if (function.is_none()) {
    return {};
  }
  return [function = holdCallable(std::move(function))](int32_t stage, int32_t microbatch, bool is_last) {
    const py::gil_scoped_acquire gil;
    (*function)(stage, microbatch, is_last);
  };
}

std::vector<PipelineTraffic::Prepared> constPlans(const Plans& plans) { return {plans.begin(), plans.end()}; }

void run(PipelinePlace& self, const core::Schedule& schedule, int32_t place, pipeline::StepInputs inputs, pipeline::StepTransfers plans) {
  withoutGil([&] { self.run(schedule, place, std::move(inputs), std::move(plans)); });
}

py::list spansOf(const PipelinePlace& place) {
  py::list out;
  for (const runtime::EngineSpan& span : place.spans()) {
    const char* kind = span.kind == runtime::EngineSpan::Kind::kCompute ? "compute" : "wait";
    out.append(py::make_tuple(kind, place.segments().nameOf(span.action), span.begin_ns, span.end_ns));
  }
  return out;
}

/// Whether a send, the edge, the microbatch, whether gradients, begin, end.
py::list transfersOf(const PipelinePlace& place) {
  py::list out;
  for (const pipeline::TrafficSpan& span : place.transfers()) {
    out.append(py::make_tuple(span.is_send, span.transfer.edge, span.transfer.microbatch, span.transfer.is_gradient, span.begin_ns, span.end_ns));
  }
  return out;
}

struct StreamMark {
  PipelineTraffic::Mark mark;
};

void bindTraffic(py::module_& module) {
  const py::class_<StreamMark> stream_mark(module, "StreamMark");
  py::class_<pipeline::PipelineCall>(module, "PipelineCall").def("has_arrived", &pipeline::PipelineCall::hasArrived);
  py::class_<PipelineTraffic, std::shared_ptr<PipelineTraffic>>(module, "PipelineTraffic")
      .def(py::init([](std::shared_ptr<c10d_backend::ReshardGroup> group, std::vector<int64_t> ranks) {
             return std::make_shared<PipelineTraffic>(std::move(group), std::move(ranks));
           }),
           py::arg("group"), py::arg("ranks"), Release())
      .def("meet", &PipelineTraffic::meet, py::arg("fields"), Release())
      .def(
          "begin",
          [](PipelineTraffic& self, const std::string& lane, uint64_t count, const std::shared_ptr<PreparedPlan>& prepared,
             const std::vector<at::Tensor>& src, const std::vector<at::Tensor>& dst) {
            pipeline::PipelineCall call = self.begin(self.lane(lane), count, prepared, src, dst,
                                                     [lane, count] { return "the transfer of " + lane + ", number " + std::to_string(count); });
            self.flush();
            return call;
          },
          py::arg("lane"), py::arg("count"), py::arg("prepared"), py::arg("src"), py::arg("dst"), Release())
      .def("wait", &PipelineTraffic::wait, py::arg("call"), Release())
      .def("check", &PipelineTraffic::check, Release())
      .def_property_readonly("has_failed", &PipelineTraffic::hasFailed)
      .def(
          "fail_stage",
          [](PipelineTraffic& self, const std::string& text, int32_t stage, int32_t microbatch) {
            self.fail({runtime::FailureKind::kStage, text, {}, stage, microbatch});
          },
          py::arg("text"), py::arg("stage"), py::arg("microbatch"), Release())
      .def(
          "fail_peer",
          [](PipelineTraffic& self, const std::string& text, std::vector<int64_t> ranks) {
            self.fail({runtime::FailureKind::kPeer, text, std::move(ranks)});
          },
          py::arg("text"), py::arg("ranks"), Release())
      .def("ends_too", &PipelineTraffic::endsToo, py::arg("group"), Release())
      .def_static(
          "mark", [](c10::Device device) { return StreamMark{PipelineTraffic::mark(device)}; }, py::arg("device"))
      .def(
          "expect_end", [](PipelineTraffic& self, const StreamMark& begin, c10::Device device) { self.expectEnd(begin.mark, device); },
          py::arg("begin"), py::arg("device"), Release())
      .def("await_ends", &PipelineTraffic::awaitEnds, Release())
      .def("await_cause", &PipelineTraffic::awaitCause, py::arg("suspects"), Release())
      .def("begin_phase", &PipelineTraffic::beginPhase, Release())
      .def("refuse", &PipelineTraffic::refuse, py::arg("text"), Release())
      .def("close", &PipelineTraffic::close, Release());
}

}  // namespace

void bindPipeline(py::module_& module) {
  bindTraffic(module);
  py::class_<StageValues>(module, "StageValues")
      .def(py::init([](int32_t stage, std::vector<std::string> inputs, std::vector<std::string> outputs, std::vector<int64_t> model_positions,
                       bool is_alone, std::string whole_because, c10::Device device, bool waits_in_weights, int32_t weights_group) {
             return StageValues{stage,    std::move(inputs),        std::move(outputs), std::move(model_positions),
                                is_alone, std::move(whole_because), waits_in_weights,   weights_group,
                                device};
           }),
           py::arg("stage"), py::arg("inputs"), py::arg("outputs"), py::arg("model_positions"), py::arg("is_alone"), py::arg("whole_because"),
           py::arg("device"), py::arg("waits_in_weights") = false, py::arg("weights_group") = 0);
  py::class_<EdgeValues>(module, "EdgeValues")
      .def(py::init<>())
      .def_readwrite("from_stage", &EdgeValues::from)
      .def_readwrite("to_stage", &EdgeValues::to)
      .def_readwrite("from_positions", &EdgeValues::from_positions)
      .def_readwrite("to_positions", &EdgeValues::to_positions)
      .def_readwrite("is_differentiable", &EdgeValues::is_differentiable)
      .def_readwrite("drops_gradient", &EdgeValues::drops_gradient)
      .def_readwrite("is_passing", &EdgeValues::is_passing)
      .def_readwrite("is_local", &EdgeValues::is_local)
      .def_readwrite("has_producer", &EdgeValues::has_producer)
      .def_readwrite("has_consumer", &EdgeValues::has_consumer);
  py::class_<EdgePlans, std::shared_ptr<EdgePlans>>(module, "EdgePlans")
      .def(py::init([](std::string lane, std::string values, bool is_joint, std::vector<at::ScalarType> dtypes, const Plans& forward,
                       const Plans& backward) {
             return EdgePlans{std::move(lane), std::move(values), is_joint, std::move(dtypes), constPlans(forward), constPlans(backward)};
           }),
           py::arg("lane"), py::arg("values"), py::arg("is_joint"), py::arg("dtypes"), py::arg("forward"), py::arg("backward"));
  py::class_<PipelinePlace>(module, "PipelinePlace")
      .def(py::init([](std::shared_ptr<PipelineTraffic> traffic, std::vector<StageValues> stages, std::vector<EdgeValues> edges,
                       const std::vector<int32_t>& segments, bool overlap, int32_t lookahead) {
             return std::make_unique<PipelinePlace>(std::move(traffic), std::move(stages), std::move(edges), core::Segments(segments),
                                                    runtime::EngineOptions{overlap, lookahead});
           }),
           py::arg("traffic"), py::arg("stages"), py::arg("edges"), py::arg("segments"), py::arg("overlap"), py::arg("lookahead"))
      .def(
          "run",
          [](PipelinePlace& self, py::object forward, const core::Schedule& schedule, int32_t place, uint64_t step, uint64_t first_microbatch,
             const std::vector<std::shared_ptr<EdgePlans>>& edges, std::map<int32_t, std::vector<std::vector<at::Tensor>>> model_inputs,
             bool has_backward, uint64_t weights_key, bool runs_weights_early, bool is_measured, std::vector<double> loss_weights,
             py::object weights_done) {
            run(self, schedule, place,
                {forwardOf(std::move(forward)), std::move(model_inputs), has_backward, weights_key, runs_weights_early, is_measured,
                 std::move(loss_weights), weightsDoneOf(std::move(weights_done))},
                {step, first_microbatch, {edges.begin(), edges.end()}});
          },
          py::arg("forward"), py::arg("schedule"), py::arg("place"), py::arg("step"), py::arg("first_microbatch"), py::arg("edges"),
          py::arg("model_inputs"), py::arg("has_backward"), py::arg("weights_key"), py::arg("runs_weights_early"), py::arg("is_measured"),
          py::arg("loss_weights"), py::arg("weights_done") = py::none())
      .def(
          "may_run_early", [](const PipelinePlace& self, int32_t stage) { return self.runner().mayRunEarlyNext(stage); }, py::arg("stage"))
      .def_property_readonly("weight_storages",
                             [](const PipelinePlace& self) {
                               std::map<int32_t, std::map<uintptr_t, int64_t>> out;
                               for (const auto& [stage, storages] : self.runner().weightStorages()) {
                                 for (const auto& [storage, num_bytes] : storages) {
                                   out[stage][reinterpret_cast<uintptr_t>(storage)] = num_bytes;
                                 }
                               }
                               return out;
                             })
      .def_property_readonly("failed_action",
                             [](const PipelinePlace& self) -> std::optional<std::pair<int32_t, int32_t>> {
                               const std::optional<core::Action> action = self.engine().failedAction();
                               return action ? std::optional(std::pair(self.segments().stageOf(action->stage), action->microbatch)) : std::nullopt;
                             })
      .def_property_readonly("failed_in",
                             [](const PipelinePlace& self) {
                               const std::optional<core::Action> action = self.engine().failedAction();
                               return action ? self.segments().nameOf(action->stage) : std::string();
                             })
      .def_property_readonly("whole_because",
                             [](const PipelinePlace& self) {
                               std::vector<std::tuple<int32_t, std::string, std::string>> out;
                               for (const auto& [segment, reason] : self.runner().wholeBecause()) {
                                 out.emplace_back(segment, self.segments().nameOf(segment), reason);
                               }
                               return out;
                             })
      .def_property_readonly("spans", &spansOf)
      .def_property_readonly("transfers", &transfersOf)
      .def_property_readonly("num_buffers", [](const PipelinePlace& self) { return self.pool().numAllocated(); })
      .def_property_readonly("buffer_bytes", [](const PipelinePlace& self) { return self.pool().bytesAllocated(); });
}

}  // namespace xmesh::bindings
