#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace xmesh::core {

enum class Collective : uint8_t { kAllReduce, kAllGather, kReduceScatter, kAllToAll };

/// One axis of a mesh, as a collective along it sees it. Plain value.
struct AxisLinks {
  int64_t size = 1;             ///< devices along it
  double latency = 0;           ///< seconds a message takes besides its bytes
  double seconds_per_byte = 0;  ///< of one device's link, where each sends to its neighbor
  double exchanged = 0;         ///< the same where each sends to all others at once; 0: no more
};

/// A cost model of collectives: a pure function, registered once. `num_bytes` is what a device holds of the value where the axis does not shard it:
/// an all-gather's output, a reduce-scatter's input, an all-reduce's value, and of an all-to-all as many times what a device holds as the axis is
/// long. In the unit of the links, of which zero is a collective of one device.
struct CollectiveCostModel {
  std::string name;
  std::string summary;
  double (*cost)(Collective collective, double num_bytes, const AxisLinks& links) = nullptr;
};

/// All models, in a fixed order.
const std::vector<CollectiveCostModel>& collectiveCostModels();
/// Throws InvalidArgument, which lists the names, where there is none of that name.
const CollectiveCostModel& collectiveCostModel(std::string_view name);
std::string_view collectiveName(Collective collective);
/// The collective of that name. Throws InvalidArgument where there is none.
Collective collectiveOf(std::string_view name);

// One function per model, each in the file of its name; collectiveCostModels() lists them.

/// Alpa's: alpha and beta times what each device sends, and a little more for each kind, by which it prefers one of equal ways.
CollectiveCostModel alpaCosts();
/// Rings, as NCCL's on large messages: n - 1 steps, twice for an all-reduce, each with its latency.
CollectiveCostModel ringCosts();
/// As gloo's: rings, but a reduce-scatter is an all-reduce of which each device keeps a part.
CollectiveCostModel glooCosts();

}  // namespace xmesh::core
