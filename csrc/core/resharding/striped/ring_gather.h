#pragma once

#include <cstdint>
#include <vector>

#include "core/resharding/striped/chunk_schedule.h"
#include "core/resharding/striped/cut.h"

namespace xmesh::core {

/// Gathers around rings, in closed form: hosts that all need the same chunks (but for those that they have) form a ring, and each receives from the
/// host before it what it lacks, so that no port carries a byte twice. A chunk that nobody in the ring has enters it at one host; these take turns.
/// A host passes on first what it had from the start, then what comes, in order of arrival: what is passed on has come before its turn, by as
/// much as the host had from the start, which is the slack for what comes late. Rings may stand side by side and be fed by each other's hosts.
/// `indices` are those of the chunks that move between hosts; NICs must be equally fast. Empty where the chunks are not such gathers, or are too
/// many. Time O(hops x feeding hosts).
std::vector<ChunkHop> ringGathers(const std::vector<Chunk>& chunks, const std::vector<int32_t>& indices, int32_t num_hosts);

}  // namespace xmesh::core
