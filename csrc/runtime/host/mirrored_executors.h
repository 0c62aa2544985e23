#pragma once

#include <memory>

#include "runtime/calls/closable_post.h"
#include "runtime/executor.h"

namespace xmesh::runtime {

/// Executors of calls that move through host memory though this rank has tensors of them on a device: the executors for host memory move their
/// mirrors. Nothing is copied before the ranks have agreed, so that a caller who has waited for the copies knows that the call is the same on all.
/// Threading: as Executors'.
class MirroredExecutors final : public Executors {
 public:
  /// `host` outlives these and what they make; `network` runs a task on the network's thread.
  MirroredExecutors(Executors& host, ClosablePost::Post network);
  ~MirroredExecutors() override;

  StartsWhen startsWhen() const override { return StartsWhen::kIsSameCall; }
  std::unique_ptr<Executor> make(Execution execution) override;
  void disconnect() override;
  void abandon() override {}  // `host` is told
  int64_t peakStagingBytes() const override { return 0; }

 private:
  Executors& host_;
  const std::shared_ptr<ClosablePost> network_;
};

}  // namespace xmesh::runtime
