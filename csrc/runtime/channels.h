#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/resharding/plan.h"

namespace xmesh::runtime {

/// Messages of one channel between two ranks keep their order; channels overtake one another. Channel 0 takes what its sender has from the start, or
/// reduces. What a rank passes on has its channel by where the rank got it, so that what is late from one rank does not hold up what came from
/// another. Both ends of a message find the same channel, since it depends on the plan only.
inline constexpr int32_t kChannelBits = 3;
inline constexpr int32_t kNumChannels = 1 << kChannelBits;

/// The channels of the messages that one rank sends and receives.
class Channels {
 public:
  Channels(const core::ReshardingPlan& plan, int64_t global_rank);
  /// Of a message of the plan, or a part of one, that the rank sends or receives.
  int32_t channelOf(const core::Message& message) const;

 private:
  /// Elements from `begin` on (up to the next source's) came from `src_rank`.
  struct Source {
    int64_t begin = 0;
    int32_t src_rank = 0;
  };
  static int64_t key(int32_t rank, int64_t task) { return task << 32 | rank; }

  std::unordered_map<int64_t, std::vector<Source>> sources_;  ///< by key(); ascending
};

}  // namespace xmesh::runtime
