#pragma once

#include <cstdint>
#include <vector>

#include "core/resharding/holder_choice.h"
#include "core/resharding/network.h"

namespace xmesh::core {

/// Builds the messages of strategies that treat one slice after the other: directly from a holder to a needer, or in parts over a group of
/// needers that then gather them. Messages are at most kMaxChunkBytes long; finish() puts them into the plan by start time.
class SliceMessenger {
 public:
  explicit SliceMessenger(ReshardingPlan& plan) : plan_(plan), network_(plan), timeline_(plan, network_), choice_(network_) {}

  const Network& network() const { return network_; }
  /// Needers of a task that lack its value: all of a Partial slice's, else those that hold no copy. Ordered by host, then rank.
  std::vector<int64_t> lackingNeeders(size_t task) const;
  /// The whole slice (every contribution of a Partial one) to one needer.
  void sendDirect(size_t task, int64_t needer);
  /// The i-th of n parts (uneven where n does not divide) to the i-th rank of the group, then each part around the ring of the group.
  void scatterAndGather(size_t task, const std::vector<int64_t>& group);
  void finish() { timeline_.finish(); }

 private:
  /// Elements [begin, end) of the slice to one rank, in chunks; returns when each is there.
  std::vector<int64_t> sendRange(size_t task, int64_t begin, int64_t end, int64_t needer);
  int64_t chunkOf(size_t task) const;

  ReshardingPlan& plan_;
  Network network_;
  Timeline timeline_;
  HolderChoice choice_;
};

}  // namespace xmesh::core
