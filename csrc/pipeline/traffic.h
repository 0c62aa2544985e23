#pragma once

#include <c10/core/Event.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "c10d/process_group_xmesh.h"
#include "c10d/reshard_group.h"
#include "c10d/watched_transfers.h"
#include "pipeline/enqueued_collectives.h"

namespace xmesh::pipeline {

using PipelineCall = c10d_backend::WatchedTransfer;

/// What goes between the ranks of one pipeline: its transfers, and the collectives that its stages enqueue on devices, which end with it. Threading:
/// one thread; fail() on any. No method needs the GIL.
class PipelineTraffic : public c10d_backend::WatchedTransfers {
 public:
  /// A point of a device's stream.
  using Mark = std::shared_ptr<c10::Event>;

  /// `ranks`: ascending global ranks of the pipeline. Throws when one of them is known not to come; tells the others when it throws.
  PipelineTraffic(std::shared_ptr<c10d_backend::ReshardGroup> group, std::vector<int64_t> ranks);
  ~PipelineTraffic() { close(); }
  PipelineTraffic(const PipelineTraffic&) = delete;
  PipelineTraffic& operator=(const PipelineTraffic&) = delete;

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
  const std::shared_ptr<c10d_backend::ReshardGroup>& group() const { return group_; }
  /// Ends the watch here; the others get a PeerError in their next phase. Idempotent.
  void close();

 private:
  const std::shared_ptr<c10d_backend::ReshardGroup> group_;
  EnqueuedCollectives enqueued_;
  Mark last_end_;  ///< of the collectives that were enqueued, if there are some since the last awaitEnds()
};

}  // namespace xmesh::pipeline
