#pragma once

#include <cstdint>
#include <vector>

#include "core/resharding/network.h"
#include "core/resharding/striped/cut.h"

namespace xmesh::core {

/// One chunk from one host to another; the list order is the order of the starts.
struct ChunkHop {
  int32_t chunk = 0;
  int32_t src_host = 0;
  int32_t dst_host = 0;
};

/// What the scheduler prefers; planning tries several and keeps what simulates best.
struct ScheduleTaste {
  double fill_weight = 0.5;      ///< how much a receiver counts less when it can take little at once (0: not at all)
  bool is_newest_first = false;  ///< which copies to repeat first among equally rare ones
  bool is_matched = false;       ///< pairs all free ports at once by a heaviest matching, instead of sender by sender
  bool uses_relays = false;      ///< first copies go to the chunk's relay where it has one
};

/// Event-driven list scheduling of chunks on the hosts' NICs. Whenever ports fall free, free senders in order of the first copies they still owe
/// pick a free receiver: those that can take a first copy from them before all others, then the one with the most still to come, weighed
/// by how full its message would be. One message of at most one chunk goes: own first copies, those owed to most receivers first, then
/// repeats, the rarest first. A holder that is not the owner sends a first copy only when the owner is behind. A received chunk may be
/// passed on.
std::vector<ChunkHop> scheduleChunks(const Cut& cut, const Network& network, const ScheduleTaste& taste);

}  // namespace xmesh::core
