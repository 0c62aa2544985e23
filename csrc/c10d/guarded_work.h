#pragma once

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "c10d/collective_faults.h"
#include "c10d/open_calls.h"

namespace xmesh::c10d_backend {

/// A Work of gloo's whose failure is that of the group's collectives, where one of their ranks has ended: see CollectiveFaults. It ends
/// when gloo has lost it, too. Threading: as gloo's.
class GuardedWork final : public ::c10d::Work {
 public:
  GuardedWork(c10::intrusive_ptr<::c10d::Work> inner, std::shared_ptr<CollectiveFaults> faults, GuardedCall call);

  bool isCompleted() override { return inner_->isCompleted() || open_->error() != nullptr; }
  bool isSuccess() const override { return open_->error() == nullptr && inner_->isSuccess(); }
  std::exception_ptr exception() const override;
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override;
  void blockCurrentStream() override { inner_->blockCurrentStream(); }
  void abort() override { inner_->abort(); }
  /// Throws gloo's error where gloo's Work has no future.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 private:
  /// For a collective, which gloo goes on with when a wait for it has ended.
  bool waitInSlices(std::chrono::milliseconds timeout);
  /// For what gloo gives up when a wait for it has ended: a send or receive, open while somebody waits.
  bool waitWatched(std::chrono::milliseconds timeout);
  /// Whether wait() threw because the call has failed, and not because it takes longer than its caller waits.
  bool hasFailed(const std::exception_ptr& error) const;

  c10::intrusive_ptr<::c10d::Work> inner_;
  std::shared_ptr<CollectiveFaults> faults_;
  const GuardedCall call_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  ///< null where gloo has none
  OpenCalls::Handle open_;
};

}  // namespace xmesh::c10d_backend
