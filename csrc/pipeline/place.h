#pragma once

#include <memory>
#include <vector>

#include "pipeline/boundary.h"
#include "pipeline/stage_runner.h"
#include "pipeline/traffic.h"
#include "runtime/pipeline/engine.h"

namespace xmesh::pipeline {

/// One rank's part of a pipeline: its stages, their transfers, and the engine that runs them in the order of a schedule.
/// Threading: one thread, without the GIL.
class PipelinePlace {
 public:
  PipelinePlace(std::shared_ptr<PipelineTraffic> traffic, std::vector<StageValues> stages, std::vector<EdgeValues> edges,
                runtime::EngineOptions options);
  ~PipelinePlace();
  PipelinePlace(const PipelinePlace&) = delete;
  PipelinePlace& operator=(const PipelinePlace&) = delete;

  /// Runs those of `actions` once that are of this rank's stages; its place may have more. Whatever it throws, nothing of the step is left behind.
  void run(const std::vector<core::Action>& actions, StepInputs inputs, StepTransfers plans);
  const runtime::Engine& engine() const { return *engine_; }
  const PipelineBoundary& boundary() const { return boundary_; }
  const StageRunner& runner() const { return runner_; }

 private:
  std::vector<runtime::PlaceEdge> placeEdges() const;

  std::shared_ptr<PipelineTraffic> traffic_;
  Flights flights_;
  StageRunner runner_;
  PipelineBoundary boundary_;
  std::shared_ptr<runtime::Engine> engine_;
};

}  // namespace xmesh::pipeline
