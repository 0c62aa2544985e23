#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/resharding/host_sets.h"
#include "core/resharding/network.h"
#include "core/resharding/striped/piece_cutter.h"
#include "core/resharding/striped/shipments.h"
#include "core/resharding/striped/slice_classes.h"

namespace xmesh::core {

/// Cuts Partial classes into atoms of about one chunk: one of the value, and those of the parts that its owner must receive.
/// Star: every contribution that the owner lacks comes from its holder that has sent least so far.
/// Chain: few hosts that hold all of them between them pass a sum along, those with most to receive so far first, since the first receives
/// nothing; one order for all atoms of a class, so that these follow each other from port to port. Every port then carries a slice once, where a
/// star's owner receives it once per contribution.
class ReductionCutter {
 public:
  /// `incoming_s`: seconds of bytes that each host receives anyhow.
  ReductionCutter(const ReshardingPlan& plan, const HostSets& hosts, const Network& network, ReductionWay way, std::vector<double> incoming_s)
      : plan_(plan), hosts_(hosts), network_(network), way_(way), incoming_s_(std::move(incoming_s)), outgoing_s_(incoming_s_.size(), 0) {}

  /// Appends to atoms, pieces and parts.
  void cut(const SliceClasses& classes, const Reduction& reduction, double atom_bytes, Shipments& out);

 private:
  /// A host on the way, and what it contributes.
  struct Contributor {
    int32_t host = 0;
    std::vector<int32_t> contributions;
  };

  std::vector<int32_t> lackingOf(const Reduction& reduction) const;
  void addStar(const Reduction& reduction, int32_t value_index, Shipments& out);
  void addChain(const Reduction& reduction, int32_t value_index, Shipments& out);
  std::vector<Contributor> chainOf(const Reduction& reduction) const;
  void addPart(Contributor from, int32_t next_atom, int64_t num_bytes, Shipments& out);
  double seconds(int64_t num_bytes, int32_t host) const { return static_cast<double>(num_bytes) / static_cast<double>(network_.nicBytesPerS(host)); }

  const ReshardingPlan& plan_;
  const HostSets& hosts_;
  const Network& network_;
  ReductionWay way_;
  std::vector<double> incoming_s_;  ///< by host
  std::vector<double> outgoing_s_;  ///< of parts, by host
  std::vector<double> place_s_;     ///< incoming_s_ when the class was begun
};

/// The next atom of about `num_bytes` for `receivers`; it has no owner yet.
Atom cutAtom(PieceCutter& cutter, double num_bytes, std::span<const int32_t> receivers, const Shipments& out);

/// The bytes of pieces in the type in which contributions are added up.
int64_t accumulatorBytes(const ReshardingPlan& plan, std::span<const Piece> pieces);

}  // namespace xmesh::core
