#include "core/resharding/chunking.h"

#include <algorithm>
#include <cmath>

namespace xmesh::core {

int64_t chunkElements(const Pipeline& pipeline, const LinkModel& links) {
  const auto nic_rate = static_cast<double>(links.nic_bytes_per_s);
  const auto local_rate = static_cast<double>(links.local_bytes_per_s);
  const double rate = pipeline.nic_hops > 0 ? nic_rate : local_rate;
  const auto all_hops = static_cast<double>(pipeline.nic_hops + pipeline.local_hops);
  const double further_hops = pipeline.nic_hops > 0
                                  ? static_cast<double>(pipeline.nic_hops - 1) + static_cast<double>(pipeline.local_hops) * nic_rate / local_rate
                                  : all_hops - 1;
  const double message_s = 1e-6 * std::max(0.1, pipeline.nic_hops > 0 ? links.message_us : links.local_latency_us);
  const double seconds = static_cast<double>(pipeline.num_bytes) / rate;
  const double best = std::sqrt(std::max(0.0, further_hops) * seconds / message_s);
  const int64_t num_chunks = std::clamp<int64_t>(std::llround(best), 1, kMaxPipelineChunks);
  return chunkElementsOf((pipeline.num_bytes + num_chunks - 1) / num_chunks, pipeline.item_bytes);
}

int64_t chunkElementsOf(int64_t chunk_bytes, int64_t item_bytes) {
  const int64_t elements = (std::min(chunk_bytes, kMaxChunkBytes) + item_bytes - 1) / item_bytes;
  return std::clamp<int64_t>(elements, 1, kMaxChunkBytes / item_bytes);
}

}  // namespace xmesh::core
