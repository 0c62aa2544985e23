#pragma once

#include <algorithm>
#include <cstdint>

namespace xmesh::runtime {

/// What the ranks agree on besides a call: of each number the most that one of them says. Plain value; zeros on the host.
struct StartTerms {
  uint64_t generation = 0;  ///< how many-th communicator of its participants the call takes
  uint64_t turn = 0;        ///< its place among the calls of one line: see StreamExecutors

  void raiseTo(const StartTerms& other) {
    generation = std::max(generation, other.generation);
    turn = std::max(turn, other.turn);
  }
};

}  // namespace xmesh::runtime
