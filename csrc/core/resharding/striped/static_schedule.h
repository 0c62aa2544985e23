#pragma once

#include <cstdint>
#include <vector>

#include "core/resharding/network.h"
#include "core/resharding/striped/chunk_schedule.h"
#include "core/resharding/striped/shipments.h"

namespace xmesh::core {

/// One block on its way in a broadcast from process 0, by process number.
struct BlockTransfer {
  int32_t round = 0;
  int32_t block = 0;
  int32_t from = 0;
  int32_t to = 0;
};

/// Broadcast of `num_blocks` blocks from process 0 to all of `num_processes` on one-ported full-duplex links in the least number of rounds,
/// num_blocks - 1 + ceil(log2(num_processes)): in round i process r sends to r + skip[i mod q] (Traeff's circulant graph). The list is in
/// order of the rounds. Time O(transfers + num_processes log^2).
std::vector<BlockTransfer> circulantBroadcast(int32_t num_processes, int32_t num_blocks);

struct StaticTransfers {
  std::vector<AtomTransfer> list;
  bool passes_on = false;  ///< some host must send at once what it has just received
  bool is_ring = false;    ///< from `ringGathers`
};

/// Transfers in closed form, without a search, where the shipments have a shape that allows it: all atoms from the same hosts to the same hosts
/// (the receivers are dealt out to the senders, each group is a circulant broadcast; where the links' latency would stall every round, several
/// broadcasts of a part of the atoms each take turns), one receiver for every atom (sender i turns to receiver i + k in its k-th step, without
/// barriers), or the same hosts needing all atoms but those they have (`ringGathers`). Otherwise empty.
StaticTransfers staticTransfers(const Shipments& shipments, const Network& network, const LinkModel& links);

}  // namespace xmesh::core
