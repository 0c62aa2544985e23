#include "runtime/channels.h"

#include <algorithm>
#include <unordered_set>

namespace xmesh::runtime {

using core::Message;
using core::Payload;

Channels::Channels(const core::ReshardingPlan& plan, int64_t global_rank) {
  std::unordered_set<int32_t> senders{static_cast<int32_t>(global_rank)};
  for (const Message& message : plan.messages) {
    if (message.dst_rank == global_rank) {
      senders.insert(message.src_rank);
    }
  }
  for (const Message& message : plan.messages) {
    if (message.payload == Payload::kValue && senders.contains(message.dst_rank)) {
      sources_[key(message.dst_rank, message.task)].push_back({message.begin, message.src_rank});
    }
  }
  for (auto& [rank_and_task, sources] : sources_) {
    std::sort(sources.begin(), sources.end(), [](const Source& a, const Source& b) { return a.begin < b.begin; });
  }
}

int32_t Channels::channelOf(const Message& message) const {
  const auto found = sources_.find(key(message.src_rank, message.task));
  if (message.payload != Payload::kValue || found == sources_.end()) {
    return 0;
  }
  const auto after = std::upper_bound(found->second.begin(), found->second.end(), message.begin,
                                      [](int64_t begin, const Source& source) { return begin < source.begin; });
  return after == found->second.begin() ? 0 : 1 + (after - 1)->src_rank % (kNumChannels - 1);
}

}  // namespace xmesh::runtime
