#include "runtime/host/host_executors.h"

#include <utility>

#include "runtime/host/host_executor.h"

namespace xmesh::runtime {
namespace {

/// A HostExecutor that is paced as long as it lives.
class PacedExecutor final : public Executor {
 public:
  PacedExecutor(Execution execution, transport::HostTransport& transport, StagingPool& staging, Pacer& pacer)
      : prepared_(std::move(execution.movement.prepared)),
        writes_once_agreed_(execution.movement.writes_once_agreed),
        keep_alive_(std::move(execution.movement.keep_alive)),
        pacer_(pacer),
        executor_(prepared_->program, transport, execution.call, prepared_->program_peers, std::move(execution.movement.src),
                  std::move(execution.movement.dst), staging, std::move(execution.on_done)) {
    pacer_.callStarted(prepared_->pacing);
  }
  PacedExecutor(const PacedExecutor&) = delete;
  PacedExecutor& operator=(const PacedExecutor&) = delete;
  ~PacedExecutor() override { pacer_.callEnded(); }

  void start(const StartTerms& /*agreed*/) override { executor_.start(!writes_once_agreed_); }
  void hasAgreed() override { executor_.allowWrites(); }
  void cancel(const Failure& /*why*/) override { executor_.cancel(); }
  void abandon() override { executor_.transportGone(); }
  std::vector<PeerProgress> progress() const override { return executor_.progress(); }

 private:
  const std::shared_ptr<const PreparedPlan> prepared_;
  const bool writes_once_agreed_;
  const std::shared_ptr<void> keep_alive_;
  Pacer& pacer_;
  HostExecutor executor_;
};

}  // namespace

std::unique_ptr<Executor> HostExecutors::make(Execution execution) {
  return std::make_unique<PacedExecutor>(std::move(execution), transport_, staging_, pacer_);
}

}  // namespace xmesh::runtime
