#include "runtime/host/pacer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>

namespace xmesh::runtime {
namespace {

constexpr double kLeastShare = 1.0 / 32;
constexpr double kEqualWithin = 1.1;

/// Whether some rank passes on to another host what it got by a message.
bool relaysBetweenHosts(const core::ReshardingPlan& plan) {
  return std::any_of(plan.messages.begin(), plan.messages.end(), [&plan](const core::Message& message) {
    const bool is_source = message.payload == core::Payload::kContribution || plan.isSentByHolder(message);
    return !is_source && plan.topology.hostOf(message.src_rank) != plan.topology.hostOf(message.dst_rank);
  });
}

/// Bytes by (sending host, receiving host).
std::map<std::pair<int64_t, int64_t>, int64_t> bytesOfHostPairs(const core::ReshardingPlan& plan) {
  std::map<std::pair<int64_t, int64_t>, int64_t> out;
  for (const core::Message& message : plan.messages) {
    const std::pair<int64_t, int64_t> hosts(plan.topology.hostOf(message.src_rank), plan.topology.hostOf(message.dst_rank));
    if (hosts.first != hosts.second) {
      out[hosts] += plan.numBytes(message);
    }
  }
  return out;
}

/// One direction of one host's NIC.
struct Lane {
  int64_t most = 0;  ///< bytes of its heaviest pair
  int64_t least = INT64_MAX;
  int64_t total = 0;
};

/// How long the busiest NIC works if all pairs of hosts take equally long; 0 where pairs of one NIC hardly differ, so that TCP's equal shares are
/// right.
double pacedSeconds(const core::ReshardingPlan& plan) {
  std::map<std::pair<int64_t, bool>, Lane> lanes;  // by host and whether it sends
  for (const auto& [hosts, num_bytes] : bytesOfHostPairs(plan)) {
    for (const auto& end : {std::pair(hosts.first, true), std::pair(hosts.second, false)}) {
      Lane& lane = lanes[end];
      lane.most = std::max(lane.most, num_bytes);
      lane.least = std::min(lane.least, num_bytes);
      lane.total += num_bytes;
    }
  }
  double seconds = 0;
  bool is_unequal = false;
  for (const auto& [end, lane] : lanes) {
    is_unequal = is_unequal || static_cast<double>(lane.most) > kEqualWithin * static_cast<double>(lane.least);
    seconds = std::max(seconds, static_cast<double>(lane.total) / static_cast<double>(plan.topology.nicBytesPerS(end.first)));
  }
  return is_unequal ? seconds : 0;
}

bool movesAllAtOnce(const core::ReshardingPlan& plan) {
  return (plan.strategy.starts_with("striped") || plan.strategy == "send_recv") && !relaysBetweenHosts(plan);
}

}  // namespace

std::vector<std::pair<int64_t, int64_t>> pacingRates(const core::ReshardingPlan& plan, int64_t global_rank) {
  const double seconds = plan.topology.links().is_measured && movesAllAtOnce(plan) ? pacedSeconds(plan) : 0;
  if (seconds <= 0) {
    return {};
  }
  const int64_t host = plan.topology.hostOf(global_rank);
  std::map<int64_t, int64_t> bytes_to;
  for (const core::Message& message : plan.messages) {
    if (message.src_rank == global_rank && plan.topology.hostOf(message.dst_rank) != host) {
      bytes_to[message.dst_rank] += plan.numBytes(message);
    }
  }
  std::vector<std::pair<int64_t, int64_t>> out;
  for (const auto& [peer, num_bytes] : bytes_to) {
    const double rate = static_cast<double>(num_bytes) / seconds;
    if (rate >= kLeastShare * static_cast<double>(plan.topology.nicBytesPerS(host))) {
      out.emplace_back(peer, std::llround(rate));
    }
  }
  return out;
}

void Pacer::callStarted(const Rates& rates) {
  if (++num_calls_ > 1) {
    lift();
    return;
  }
  for (const auto& [peer, bytes_per_s] : rates) {
    transport_.pace(peer, bytes_per_s);
    paced_.push_back(peer);
  }
}

void Pacer::callEnded() {
  if (--num_calls_ == 0 && !is_abandoned_) {
    lift();
  }
}

void Pacer::lift() {
  for (const int32_t peer : paced_) {
    transport_.pace(peer, 0);
  }
  paced_.clear();
}

}  // namespace xmesh::runtime
