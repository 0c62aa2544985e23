#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/pipeline/segments.h"
#include "pipeline/flights.h"
#include "pipeline/tensor_pool.h"
#include "pipeline/traffic.h"
#include "runtime/pipeline/engine.h"

namespace xmesh::pipeline {

/// The plans of one edge's transfers, by microbatch; equal microbatches share them.
struct EdgePlans {
  std::string lane;                                 ///< the lane of the values; that of the gradients is derived
  std::string values;                               ///< their names, for error texts
  bool is_joint = false;                            ///< this rank gives and takes: one call does both, begun where the value is made
  std::vector<at::ScalarType> dtypes;               ///< of the values
  std::vector<PipelineTraffic::Prepared> forward;   ///< by microbatch
  std::vector<PipelineTraffic::Prepared> backward;  ///< by microbatch; empty without gradients
};

/// What one step's transfers are given.
struct StepTransfers {
  uint64_t step = 0;
  uint64_t first_microbatch = 0;                        ///< how many all earlier steps had together
  std::vector<std::shared_ptr<const EdgePlans>> edges;  ///< one per edge of the place; unused where the edge is local
};

/// A transfer in time: steady clock, nanoseconds, from its start (the value exists, or room is made for it) to its end.
struct TrafficSpan {
  runtime::Transfer transfer;
  bool is_send = false;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

/// The transfers of one rank's stages, over its PipelineTraffic, with received values in pooled buffers.
/// Threading: as the engine's.
class PipelineBoundary final : public runtime::BoundaryTraffic {
 public:
  PipelineBoundary(std::shared_ptr<PipelineTraffic> traffic, Flights& flights, std::shared_ptr<const core::Segments> segments)
      : traffic_(std::move(traffic)), flights_(flights), segments_(std::move(segments)) {}

  void beginStep(StepTransfers plans);
  void endStep();

  void postReceive(const runtime::Transfer& transfer) override;
  bool hasArrived(const runtime::Transfer& transfer) const override;
  void waitReceive(const runtime::Transfer& transfer) override;
  void send(const runtime::Transfer& transfer) override;
  void flush() override { traffic_->flush(); }
  void drain() override;
  void check() const override { traffic_->check(); }

  const TensorPool& pool() const { return pool_; }
  /// The spans of those transfers of the last step that have ended by now.
  std::vector<TrafficSpan> spans() const;

 private:
  /// A transfer that has been begun.
  struct Pending {
    PipelineCall call;
    TrafficSpan span;
    std::vector<at::Tensor> buffers;  ///< that receive
  };
  /// One that the runner need not wait for any more, though a device's stream may still have to pass it.
  struct Waited {
    std::shared_ptr<const runtime::ReshardCall> call;
    TrafficSpan span;
  };
  struct EdgeLanes {
    PipelineTraffic::Lane values;
    PipelineTraffic::Lane gradients;
  };
  const PipelineTraffic::Prepared& planOf(const runtime::Transfer& transfer) const;
  std::vector<at::Tensor> buffersFor(const runtime::Transfer& transfer);
  Pending begin(const runtime::Transfer& transfer, const std::vector<at::Tensor>& src, std::vector<at::Tensor> dst, bool is_send);
  void wait(const Pending& pending);

  std::shared_ptr<PipelineTraffic> traffic_;
  Flights& flights_;
  std::shared_ptr<const core::Segments> segments_;
  TensorPool pool_;
  std::vector<EdgeLanes> lanes_;  ///< by edge
  StepTransfers plans_;
  std::map<runtime::Transfer, Pending> receives_;
  std::deque<Pending> sends_;
  std::vector<Waited> waited_;
};

}  // namespace xmesh::pipeline
