#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace xmesh::runtime {

/// The ranks of a call as one of them sees them.
struct Participants {
  std::vector<int64_t> ranks;  ///< global, ascending
  std::vector<int32_t> peers;  ///< their group ranks, in the same order
  uint64_t hash = 0;           ///< hashRanks(ranks)
  int64_t my_index = -1;       ///< this rank's index among them

  size_t size() const { return ranks.size(); }
  bool contains(int64_t global_rank) const { return std::binary_search(ranks.begin(), ranks.end(), global_rank); }
  /// Group rank of the participant `distance` after (or, negative, before) this rank, around the circle.
  int32_t peerAt(int64_t distance) const {
    const auto count = static_cast<int64_t>(peers.size());
    return peers[static_cast<size_t>(((my_index + distance) % count + count) % count)];
  }
};

/// What the ranks of a call must agree on, and who they are. Immutable.
struct CallTerms {
  Participants participants;
  std::string fingerprint;  ///< a hash of all that must be equal
  std::string fields;       ///< the same in words (packFields)
  std::string summary;      ///< one line for error texts
};

}  // namespace xmesh::runtime
