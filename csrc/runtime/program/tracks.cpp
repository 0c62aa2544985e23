#include "runtime/program/tracks.h"

namespace xmesh::runtime {

int32_t trackOf(const core::ReshardingPlan& plan, const core::Message& message) {
  constexpr int64_t kPassedOn = kNumTracks - 1;
  if (message.payload != core::Payload::kValue || plan.isSentByHolder(message)) {
    return 0;
  }
  // Slices whose numbers differ by a multiple of the divisor, as in a column of a grid of slices, get different tracks too.
  return 1 + static_cast<int32_t>((message.task + message.task / kPassedOn) % kPassedOn);
}

}  // namespace xmesh::runtime
