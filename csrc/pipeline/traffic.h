#pragma once

#include <c10/core/Event.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "c10d/process_group_xmesh.h"
#include "c10d/reshard_group.h"
#include "pipeline/enqueued_collectives.h"
#include "runtime/fork_mark.h"

namespace xmesh::pipeline {

/// A transfer that has been begun.
struct PipelineCall {
  std::shared_ptr<runtime::ReshardCall> call;
  /// Null: what comes is there for the host when the call has ended. Else it is there for streams that go on behind the call.
  std::shared_ptr<c10d_backend::CallOnDevice> on_device;

  /// Whether PipelineTraffic::wait() returns at once.
  bool hasArrived() const { return on_device != nullptr ? call->isEnqueued() : call->isCompleted(); }
};

/// The transfers of one pipeline on one rank. They need no agreement of their own: the ranks have met once (meet()), and number them alike. All are
/// tied to one watch: a rank that fails, is lost or refuses ends them on all ranks. Threading: one thread; fail() on any. No method needs the GIL.
class PipelineTraffic {
 public:
  using Prepared = std::shared_ptr<const runtime::PreparedPlan>;
  /// A point of a device's stream.
  using Mark = std::shared_ptr<c10::Event>;
  /// Transfers that are numbered together.
  struct Lane {
    uint64_t key = 0;
  };

  /// `ranks`: ascending global ranks of the pipeline. Throws when one of them is known not to come; tells the others when it throws.
  PipelineTraffic(std::shared_ptr<c10d_backend::ReshardGroup> group, std::vector<int64_t> ranks);
  ~PipelineTraffic();
  PipelineTraffic(const PipelineTraffic&) = delete;
  PipelineTraffic& operator=(const PipelineTraffic&) = delete;

  /// From now on `describe` says what this rank does, for the error texts of other ranks; it is called on the network's thread until close().
  void describeBy(std::function<std::string()> describe);
  /// Waits until every rank is here with equal fields; a difference is a ValueError on all, which names the field.
  void meet(const runtime::CallFields& fields);
  /// The lane of that name: equal on all ranks, another for every name.
  Lane lane(const std::string& name);
  /// The transfers from now on are of the next phase, the same on all ranks: a phase is one thing that all of them do together.
  void beginPhase() { ++phase_; }
  /// Transfer number `count` of a lane, which starts with the next flush(); `what` tells for error texts what it carries.
  PipelineCall begin(Lane lane, uint64_t count, const Prepared& prepared, const std::vector<at::Tensor>& src, const std::vector<at::Tensor>& dst,
                     std::function<std::string()> what);
  /// Starts the transfers begun since the last time; together they wake the network's thread once.
  void flush() { group_->service().flush(); }
  /// Waits for a transfer, at most the group's timeout; then all ranks are asked and the pipeline fails. Throws what the transfer failed with. Of one
  /// that receives on a device it waits until the stream has it, behind which the current stream goes on.
  void wait(const PipelineCall& call);
  /// Throws what the pipeline has failed with, if it has.
  void check() const;
  bool hasFailed() const { return watch_->failure().has_value(); }
  /// From now on the pipeline's failure ends the group's collectives on this rank. The group may go before.
  void endsToo(const c10::intrusive_ptr<c10d_backend::ProcessGroupXmesh>& group);
  /// Where a device's current stream is now.
  static Mark mark(c10::Device device);
  /// A collective of the pipeline's that a device's current stream has got since `begin`: where it lasts for longer than the group's timeout, all
  /// ranks are asked, and the pipeline fails.
  void expectEnd(const Mark& begin, c10::Device device);
  /// Waits until the device is through with all of these. Throws what the pipeline has failed with: they may have been aborted.
  void awaitEnds();
  /// For a collective that failed: throws what the pipeline has failed with, or will, since another rank has died or failed. Returns where it does
  /// not fail within seconds. `suspects`: the ranks are asked what they do, and it fails with what they say.
  void awaitCause(bool suspects);
  /// Ends the pipeline on every rank.
  void fail(runtime::Failure failure);
  /// Ends it with a ValueError: on the others once they come to this rank's phase.
  void refuse(std::string text) { fail({runtime::FailureKind::kMistake, std::move(text), {}, -1, -1, phase_}); }
  const std::shared_ptr<c10d_backend::ReshardGroup>& group() const { return group_; }
  /// Ends the watch here; the others get a PeerError in their next phase. Idempotent.
  void close();

 private:
  struct Description;

  std::shared_ptr<c10d_backend::ReshardGroup> group_;
  const std::vector<int64_t> ranks_;
  const uint64_t number_;  ///< counts this group's pipelines of these ranks
  const std::string name_;
  const uint64_t participants_;
  std::map<std::string, Lane> lanes_;
  std::shared_ptr<Description> description_;
  std::shared_ptr<runtime::ReshardCall> watch_;
  EnqueuedCollectives enqueued_;
  Mark last_end_;  ///< of the collectives that were enqueued, if there are some since the last awaitEnds()
  uint64_t phase_ = 0;
  uint64_t num_meetings_ = 0;
  const runtime::ForkMark fork_;
  bool is_closed_ = false;
};

}  // namespace xmesh::pipeline
