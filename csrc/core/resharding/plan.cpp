#include "core/resharding/plan.h"

#include <algorithm>

namespace xmesh::core {
namespace {

std::map<int64_t, int64_t> nicBytes(const ReshardingPlan& plan, bool is_sent) {
  std::map<int64_t, int64_t> out;
  for (int64_t rank : plan.participants()) {
    out[plan.topology.hostOf(rank)] = 0;
  }
  for (const Message& message : plan.messages) {
    const int64_t from = plan.topology.hostOf(message.src_rank);
    const int64_t to = plan.topology.hostOf(message.dst_rank);
    if (from != to) {
      out[is_sent ? from : to] += plan.numBytes(message);
    }
  }
  return out;
}

}  // namespace

std::string payloadStr(const Message& message) {
  switch (message.payload) {
    case Payload::kContribution:
      return "contribution " + std::to_string(message.contribution);
    case Payload::kPartialSum:
      return "partial sum";
    case Payload::kValue:
      break;
  }
  return "value";
}

std::vector<int64_t> ReshardingPlan::participants() const {
  std::vector<int64_t> out;
  for (const TensorPair& pair : tensors) {
    for (const TensorSpec* spec : {&pair.src, &pair.dst}) {
      const std::vector<int64_t> ranks = spec->ranks();
      out.insert(out.end(), ranks.begin(), ranks.end());
    }
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

bool ReshardingPlan::isSentByHolder(const Message& message) const {
  const std::vector<std::vector<int64_t>>& contributions =
      holders[static_cast<size_t>(tasks[static_cast<size_t>(message.task)].holders)].contributions;
  return message.payload == Payload::kValue && contributions.size() == 1 &&
         std::binary_search(contributions.front().begin(), contributions.front().end(), int64_t{message.src_rank});
}

std::map<int64_t, int64_t> ReshardingPlan::bytesSent() const { return nicBytes(*this, true); }
std::map<int64_t, int64_t> ReshardingPlan::bytesReceived() const { return nicBytes(*this, false); }

}  // namespace xmesh::core
