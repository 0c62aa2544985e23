#pragma once

#include <memory>
#include <vector>

#include "core/pipeline/schedule.h"
#include "core/pipeline/segments.h"
#include "pipeline/boundary.h"
#include "pipeline/stage_runner.h"
#include "pipeline/traffic.h"
#include "runtime/pipeline/engine.h"

namespace xmesh::pipeline {

/// One rank's part of a pipeline: its stages, or their segments, their transfers, and the engine that runs them in the order of a schedule.
/// Threading: one thread, without the GIL.
class PipelinePlace {
 public:
  /// `stages` and `edges` are of segments, by their numbers among all of the pipeline's.
  PipelinePlace(std::shared_ptr<PipelineTraffic> traffic, std::vector<StageValues> stages, std::vector<EdgeValues> edges, core::Segments segments,
                runtime::EngineOptions options);
  ~PipelinePlace();
  PipelinePlace(const PipelinePlace&) = delete;
  PipelinePlace& operator=(const PipelinePlace&) = delete;

  /// Runs once what a place of the schedule runs and is this rank's; the place may have more. Of a schedule of stages each runs its segments one
  /// after the other. Whatever it throws, nothing of the step is left behind.
  void run(const core::Schedule& schedule, int32_t place, StepInputs inputs, StepTransfers plans);
  const runtime::Engine& engine() const { return *engine_; }
  /// What the last step did and waited for, ordered by begin: of what is on a device, when the device did it, beside what is on cpu.
  std::vector<runtime::EngineSpan> spans() const;
  /// Its transfers that have ended by now; one from a device begins when the device has made the value.
  std::vector<TrafficSpan> transfers() const;
  const TensorPool& pool() const { return boundary_.pool(); }
  const StageRunner& runner() const { return runner_; }
  const core::Segments& segments() const { return *segments_; }

 private:
  std::vector<runtime::PlaceEdge> placeEdges() const;

  std::shared_ptr<PipelineTraffic> traffic_;
  std::shared_ptr<const core::Segments> segments_;
  Flights flights_;
  StageRunner runner_;
  PipelineBoundary boundary_;
  std::shared_ptr<runtime::Engine> engine_;
};

}  // namespace xmesh::pipeline
