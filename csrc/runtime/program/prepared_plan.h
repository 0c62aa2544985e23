#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/resharding/plan.h"
#include "runtime/agreement/participants.h"
#include "runtime/program/program.h"

namespace xmesh::runtime {

/// The kinds of device that a tensor is on, as c10::DeviceType's numbers; 0: host memory.
struct DeviceKinds {
  int16_t src = 0;
  int16_t dst = 0;
};

/// Whether host memory carries tensors on these: all but those that are on one kind of device, all of them, at both ends.
inline bool moveThroughHost(const std::vector<DeviceKinds>& devices) {
  return devices.empty() || devices.front().src == 0 || std::any_of(devices.begin(), devices.end(), [&](const DeviceKinds& kinds) {
           return kinds.src != devices.front().src || kinds.dst != devices.front().src;
         });
}

/// A plan made ready for one rank: computed once per set of arguments and shared by all calls with them. Immutable.
struct PreparedPlan {
  CallTerms terms;
  std::shared_ptr<const core::ReshardingPlan> plan;
  std::shared_ptr<const Program> program;
  std::vector<DeviceKinds> devices;                  ///< by tensor
  bool through_host = false;                         ///< host memory carries them
  std::vector<std::optional<Participants>> circles;  ///< the program's circles; nullopt for one that this rank is not in
  std::vector<int32_t> program_peers;                ///< group ranks of program->peers()
  /// (group rank, bytes per second) of the peers on other hosts; empty to let TCP share the NIC.
  std::vector<std::pair<int32_t, int64_t>> pacing;
};

}  // namespace xmesh::runtime
