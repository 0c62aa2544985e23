#pragma once

#include <cstdint>
#include <vector>

#include "core/resharding/network.h"
#include "core/resharding/striped/chunk_schedule.h"
#include "core/resharding/striped/cut.h"

namespace xmesh::core {

/// One chunk on its way in a broadcast from process 0, by process number.
struct BroadcastHop {
  int32_t round = 0;
  int32_t chunk = 0;
  int32_t from = 0;
  int32_t to = 0;
};

/// Broadcast of `num_chunks` chunks from process 0 to all of `num_processes` on one-ported full-duplex links in the least number of rounds,
/// num_chunks - 1 + ceil(log2(num_processes)): in round i process r sends to r + skip[i mod q] (Traeff's circulant graph). The list is in
/// order of the rounds. Time O(hops + num_processes log^2).
std::vector<BroadcastHop> circulantBroadcast(int32_t num_processes, int32_t num_chunks);

struct StaticHops {
  std::vector<ChunkHop> list;
  bool passes_on = false;  ///< some host must send at once what it has just received
  bool is_ring = false;    ///< from `ringGathers`
};

/// Hops in closed form, without a search, where the cut have a shape that allows it: all chunks from the same hosts to the same hosts
/// (the receivers are dealt out to the senders, each group is a circulant broadcast; where the links' latency would stall every round, several
/// broadcasts of some of the chunks each take turns), one receiver for every chunk (sender i turns to receiver i + k in its k-th step, without
/// barriers), or the same hosts needing all chunks but those they have (`ringGathers`). Otherwise empty.
StaticHops staticHops(const Cut& cut, const Network& network, const LinkModel& links);

}  // namespace xmesh::core
