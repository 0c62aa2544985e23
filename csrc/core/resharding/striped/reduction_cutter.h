#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/resharding/host_sets.h"
#include "core/resharding/network.h"
#include "core/resharding/striped/cut.h"
#include "core/resharding/striped/range_cutter.h"
#include "core/resharding/striped/slice_classes.h"

namespace xmesh::core {

/// Cuts Partial classes into chunks of about one chunk: one of the value, and those of the partial ones that its owner must receive.
/// Star: every contribution that the owner lacks comes from its holder that has sent least so far.
/// Chain: few hosts that hold all of them between them pass a sum along, those with most to receive so far first, since the first receives
/// nothing; one order for all chunks of a class, so that these follow each other from port to port. Every port then carries a slice once, where a
/// star's owner receives it once per contribution.
class ReductionCutter {
 public:
  /// `incoming_s`: seconds of bytes that each host receives anyhow.
  ReductionCutter(const ReshardingPlan& plan, const HostSets& hosts, const Network& network, ReductionWay way, std::vector<double> incoming_s)
      : plan_(plan), hosts_(hosts), network_(network), way_(way), incoming_s_(std::move(incoming_s)), outgoing_s_(incoming_s_.size(), 0) {}

  /// Appends to chunks, ranges and partials.
  void cut(const SliceClasses& classes, const PartialClass& partial_class, double chunk_bytes, Cut& out);

 private:
  /// A host on the way, and what it contributes.
  struct Contributor {
    int32_t host = 0;
    std::vector<int32_t> contributions;
  };

  std::vector<int32_t> lackingOf(const PartialClass& partial_class) const;
  void addStar(const PartialClass& partial_class, int32_t value_index, Cut& out);
  void addChain(const PartialClass& partial_class, int32_t value_index, Cut& out);
  std::vector<Contributor> chainOf(const PartialClass& partial_class) const;
  void addPartial(Contributor from, int32_t next_chunk, int64_t num_bytes, Cut& out);
  double seconds(int64_t num_bytes, int32_t host) const { return static_cast<double>(num_bytes) / static_cast<double>(network_.nicBytesPerS(host)); }

  const ReshardingPlan& plan_;
  const HostSets& hosts_;
  const Network& network_;
  ReductionWay way_;
  std::vector<double> incoming_s_;         ///< by host
  std::vector<double> outgoing_s_;         ///< by host, the seconds that its partial chunks take to be sent
  std::vector<double> incoming_before_s_;  ///< incoming_s_ when the class was begun
};

/// The next chunk of about `num_bytes` for `receivers`; it has no owner yet.
Chunk cutChunk(RangeCutter& cutter, double num_bytes, std::span<const int32_t> receivers, const Cut& out);

/// The bytes of ranges in the type in which contributions are added up.
int64_t accumulatorBytes(const ReshardingPlan& plan, std::span<const SliceRange> ranges);

}  // namespace xmesh::core
