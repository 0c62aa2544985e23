#include "pipeline/place.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/error.h"

namespace xmesh::pipeline {

PipelinePlace::PipelinePlace(std::shared_ptr<PipelineTraffic> traffic, std::vector<StageValues> stages, std::vector<EdgeValues> edges,
                             core::Segments segments, runtime::EngineOptions options)
    : traffic_(std::move(traffic)),
      segments_(std::make_shared<const core::Segments>(std::move(segments))),
      flights_(std::move(stages), std::move(edges)),
      runner_(flights_, segments_),
      boundary_(traffic_, flights_, segments_),
      engine_(std::make_shared<runtime::Engine>(options)) {
  traffic_->describeBy(
      [engine = engine_, segments = segments_] { return engine->describe([&](const core::Action& action) { return segments->nameOf(action); }); });
}

PipelinePlace::~PipelinePlace() { traffic_->describeBy({}); }

std::vector<runtime::PlaceEdge> PipelinePlace::placeEdges() const {
  std::vector<runtime::PlaceEdge> out;
  for (const EdgeValues& edge : flights_.edges()) {
    const bool has_gradient = !edge.differentiable().empty();
    out.push_back({edge.from, edge.to, has_gradient, edge.has_producer && !edge.is_local, edge.has_consumer && !edge.is_local});
  }
  return out;
}

std::vector<runtime::EngineSpan> PipelinePlace::spans() const {
  using runtime::EngineSpan;
  const std::map<core::Action, DeviceSpan>& on_devices = runner_.deviceSpans();
  std::vector<EngineSpan> out;
  std::optional<EngineSpan> waiting;  // the host's last wait, whatever became of it on a device
  int64_t last_ns = 0;
  for (const EngineSpan& span : engine_->spans()) {
    if (span.kind == EngineSpan::Kind::kWait) {
      waiting = span;
      continue;
    }
    EngineSpan computed = span;
    if (const auto there = on_devices.find(span.action); there != on_devices.end()) {
      computed.begin_ns = std::max(there->second.begin_ns, last_ns);
      computed.end_ns = std::max(there->second.end_ns, computed.begin_ns);
      if (waiting.has_value()) {
        waiting->end_ns = computed.begin_ns;
      }
    }
    if (waiting.has_value()) {
      waiting->begin_ns = std::max(waiting->begin_ns, last_ns);
      if (waiting->end_ns > waiting->begin_ns) {
        out.push_back(*waiting);
      }
      waiting.reset();
    }
    out.push_back(computed);
    last_ns = computed.end_ns;
  }
  std::stable_sort(out.begin(), out.end(), [](const EngineSpan& a, const EngineSpan& b) { return a.begin_ns < b.begin_ns; });
  return out;
}

std::vector<TrafficSpan> PipelinePlace::transfers() const {
  const std::map<core::Action, DeviceSpan>& on_devices = runner_.deviceSpans();
  std::vector<TrafficSpan> out = boundary_.spans();
  for (TrafficSpan& span : out) {
    const EdgeValues& edge = flights_.edges()[static_cast<size_t>(span.transfer.edge)];
    if (!span.is_send || on_devices.empty()) {
      continue;
    }
    const int32_t maker = span.transfer.is_gradient ? edge.to : edge.from;
    for (const core::ActionKind kind : {core::ActionKind::kForward, core::ActionKind::kBackward, core::ActionKind::kBackwardInput}) {
      const auto made = on_devices.find({kind, maker, span.transfer.microbatch});
      if (made != on_devices.end() && (kind != core::ActionKind::kForward) == span.transfer.is_gradient) {
        span.begin_ns = std::max(span.begin_ns, made->second.end_ns);
      }
    }
    span.begin_ns = std::min(span.begin_ns, span.end_ns);
  }
  return out;
}

void PipelinePlace::run(const core::Schedule& schedule, int32_t place, StepInputs inputs, StepTransfers plans) {
  const bool is_divided = schedule.segments.isDivided();
  core::require(!is_divided || schedule.segments == *segments_,
                "schedule '" + schedule.name + "' is an order of other segments than the stages have");
  const std::vector<core::Action> all = is_divided ? schedule.actionsOf(place) : segments_->expand(schedule.actionsOf(place));
  std::vector<core::Action> own;
  std::copy_if(all.begin(), all.end(), std::back_inserter(own), [this](const core::Action& action) { return flights_.has(action.stage); });
  const std::vector<runtime::PlaceStep> steps = runtime::placeProgram(own, placeEdges());
  for (const core::Action& action : own) {
    if (core::flightChangeOf(action.kind) == core::FlightChange::kEnds) {
      inputs.last_weights[action.stage] = action;
    }
  }
  runner_.beginStep(std::move(inputs));
  boundary_.beginStep(std::move(plans));
  try {
    engine_->run(steps, runner_, boundary_);
  } catch (...) {
    boundary_.endStep();
    runner_.endStep(/*is_done=*/false);
    throw;
  }
  boundary_.endStep();
  runner_.endStep(/*is_done=*/true);
}

}  // namespace xmesh::pipeline
