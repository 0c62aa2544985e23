#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace xmesh::runtime {

/// What the ranks agree on besides a call: of each number the most that one of them says. Plain value; zeros on the host.
struct StartTerms {
  uint64_t turn = 0;  ///< the call's place among those on its device: see CallOrder
  /// How many-th communicator it takes of its participants, then of each circle of its program; zero says nothing.
  std::vector<uint64_t> generations;

  void raiseTo(const StartTerms& other) {
    turn = std::max(turn, other.turn);
    generations.resize(std::max(generations.size(), other.generations.size()));
    for (size_t i = 0; i < other.generations.size(); ++i) {
      generations[i] = std::max(generations[i], other.generations[i]);
    }
  }
};

}  // namespace xmesh::runtime
