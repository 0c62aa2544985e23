#pragma once

#include <cstdint>

#include "core/topology.h"

namespace xmesh::core {

/// No message is longer: receivers stage chunks that are not contiguous in a bounded pool.
constexpr int64_t kMaxChunkBytes = int64_t{4} << 20;
/// No pipeline is cut finer than this by itself.
constexpr int64_t kMaxPipelineChunks = 256;

/// A slice's way, for choosing its chunks.
struct Pipeline {
  int64_t num_bytes = 0;
  int64_t item_bytes = 1;
  int64_t nic_hops = 0;    ///< NIC hops one after another, the first included
  int64_t local_hops = 0;  ///< hops inside a host after the last NIC hop
};

/// Elements per chunk. With K chunks a pipeline of time T and d further hops takes T (1 + d/K) + K o, least at K = sqrt(d T / o)
/// (o: cost of one message). Without further hops nothing is gained by cutting, and only kMaxChunkBytes cuts.
int64_t chunkElements(const Pipeline& pipeline, const LinkModel& links);

/// Elements per chunk of at most `chunk_bytes` (and kMaxChunkBytes), at least one.
int64_t chunkElementsOf(int64_t chunk_bytes, int64_t item_bytes);

}  // namespace xmesh::core
