#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/resharding/plan.h"
#include "runtime/program.h"

namespace xmesh::runtime {

/// A plan made ready for one rank: computed once per set of arguments and shared by all calls with them. Immutable.
struct PreparedPlan {
  std::shared_ptr<const core::ReshardingPlan> plan;
  std::shared_ptr<const Program> program;  ///< null where nothing is moved: ranks only meet, or watch
  std::vector<int64_t> participants;       ///< ascending global ranks of either mesh
  std::vector<int32_t> participant_peers;  ///< their group ranks, in the same order
  std::vector<int32_t> program_peers;      ///< group ranks of program->peers()
  /// (group rank, bytes per second) of the peers on other hosts; empty to let TCP share the NIC.
  std::vector<std::pair<int32_t, int64_t>> pacing;
  uint64_t participants_hash = 0;
  int64_t my_index = -1;    ///< this rank's place in participants
  std::string fingerprint;  ///< of the plan and of everything else that ranks must agree on
  std::string fields;       ///< the same in words (packFields)
  std::string summary;      ///< one line for error texts

  /// Group rank of the participant `distance` places after (or, negative, before) this rank, around the circle.
  int32_t participantAt(int64_t distance) const {
    const auto count = static_cast<int64_t>(participants.size());
    return participant_peers[static_cast<size_t>(((my_index + distance) % count + count) % count)];
  }
};

}  // namespace xmesh::runtime
