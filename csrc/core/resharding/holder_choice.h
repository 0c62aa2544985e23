#pragma once

#include <cstdint>
#include <vector>

#include "core/resharding/network.h"

namespace xmesh::core {

/// Chooses which holder sends to whom so that senders carry like loads: a holder on the receiver's own host if there is one, else one on the
/// host whose NIC has the least to send so far (in seconds); among the ranks of a host the one with the least bytes; ties: the lowest.
class HolderChoice {
 public:
  explicit HolderChoice(const Network& network)
      : network_(network), nic_bytes_(static_cast<size_t>(network.numHosts())), rank_bytes_(static_cast<size_t>(network.numRanks())) {}

  /// One of `holders` (global ranks, ascending, not empty) to send `num_bytes` to the global rank `receiver`; counts the bytes.
  int64_t choose(const std::vector<int64_t>& holders, int64_t receiver, int64_t num_bytes);

 private:
  const Network& network_;
  std::vector<int64_t> nic_bytes_;
  std::vector<int64_t> rank_bytes_;
};

}  // namespace xmesh::core
