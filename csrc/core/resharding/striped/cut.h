#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/resharding/host_sets.h"
#include "core/resharding/network.h"
#include "core/resharding/striped/slice_classes.h"

namespace xmesh::core {

/// The smallest thing the chunk scheduler moves between hosts: ranges of tasks with the same sources and destinations, at most one chunk long.
/// What it refers to is kept by its Cut.
struct Chunk {
  int64_t first_range = 0;
  int32_t num_ranges = 0;
  int32_t owner = 0;  ///< host that owes the first copy
  int64_t num_bytes = 0;
  std::span<const int32_t> sources{};    ///< hosts that have it from the start; none where its owner gets it from `num_partials` chunks
  std::span<const int32_t> receivers{};  ///< hosts that need it over their NIC; none: it only moves inside its sources
  int32_t relay = -1;                    ///< receiver that should get the first copy, having ports to pass it on; -1: any
  int32_t partial = -1;                  ///< index in Cut::partials; -1 for a value
  int32_t num_partials = 0;              ///< if its owner reduces it: the chunks that the owner receives first
};

/// What a chunk is that carries no value: contributions that its owner adds up, with the partial chunk it received if there is one.
struct PartialChunk {
  int32_t next_chunk = 0;              ///< what it is added to: the value, or the partial chunk of the next host on the way
  std::vector<int32_t> contributions;  ///< held by the owner
};

/// How contributions reach the host that reduces them.
enum class ReductionWay : uint8_t {
  kStar,   ///< each by itself
  kChain,  ///< in sums that grow from host to host
};

struct CutOptions {
  int64_t num_chunks = 0;       ///< chunks per busiest port; 0 chooses them from the latency model and the size
  bool has_few_owners = false;  ///< instead of levelled shares any split within the same largest load that leaves most classes to one sender
  ReductionWay reduction_way = ReductionWay::kStar;
};

/// What a reshard ships between hosts, cut into chunks.
struct Cut {
  std::vector<Chunk> chunks;
  std::vector<PartialChunk> partials;
  std::vector<SliceRange> ranges;
  HostSetTable host_sets;
  double bottleneck_s = 0;  ///< seconds that the busiest port must be busy, given the shares
  int64_t max_chunk_bytes = 0;
  double chunks_per_port = 0;  ///< chunks that the busiest port carries
  int64_t most_messages = 0;   ///< most messages that one host receives or owes
  int64_t largest_fan = 0;     ///< most hosts that need one chunk
  int64_t most_partials = 0;   ///< most partial chunks of one value, whichever way they come
  int64_t longest_chain = 0;   ///< about how many partial chunks come one after the other before a value

  std::span<const SliceRange> rangesOf(const Chunk& chunk) const {
    return std::span(ranges).subspan(static_cast<size_t>(chunk.first_range), static_cast<size_t>(chunk.num_ranges));
  }
};

/// Slices with the same holding and needing hosts form a class; first copies are spread over the holders by water-filling (with the further
/// copies spread over holders and needers), each class is cut into stripes by first sender and each stripe into chunks of at most one
/// chunk. A Partial slice that no needing host can reduce alone is striped over needing hosts: each reduces its stripe and owes the value.
Cut cutIntoChunks(const ReshardingPlan& plan, const Network& network, const CutOptions& options);

}  // namespace xmesh::core
