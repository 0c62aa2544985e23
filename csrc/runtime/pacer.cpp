#include "runtime/pacer.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace xmesh::runtime {
namespace {

constexpr double kLeastShare = 1.0 / 32;
constexpr double kEqualWithin = 1.1;

/// Whether some rank passes on to another host what it got by a message.
bool relaysBetweenHosts(const core::ReshardingPlan& plan) {
  return std::any_of(plan.messages.begin(), plan.messages.end(), [&plan](const core::Message& message) {
    const core::Holders& holders = plan.holders[static_cast<size_t>(plan.tasks[static_cast<size_t>(message.task)].holders)];
    const std::vector<int64_t>& first = holders.contributions.front();
    const bool is_source = message.payload == core::Payload::kContribution ||
                           (holders.contributions.size() == 1 && std::binary_search(first.begin(), first.end(), int64_t{message.src_rank}));
    return !is_source && plan.topology.hostOf(message.src_rank) != plan.topology.hostOf(message.dst_rank);
  });
}

/// Whether some NIC carries pairs of hosts whose bytes differ, so that TCP's equal shares are not what the plan wants.
bool hasUnequalPairs(const core::ReshardingPlan& plan) {
  std::map<std::pair<int64_t, int64_t>, int64_t> bytes_of;
  for (const core::Message& message : plan.messages) {
    const std::pair<int64_t, int64_t> hosts(plan.topology.hostOf(message.src_rank), plan.topology.hostOf(message.dst_rank));
    if (hosts.first != hosts.second) {
      bytes_of[hosts] += plan.numBytes(message);
    }
  }
  std::map<int64_t, std::pair<int64_t, int64_t>> range_of_nic;  // least and most bytes of a pair; a NIC's two directions are told apart by sign
  for (const auto& [hosts, num_bytes] : bytes_of) {
    for (const int64_t nic : {hosts.first + 1, -hosts.second - 1}) {
      auto& [least, most] = range_of_nic.try_emplace(nic, num_bytes, num_bytes).first->second;
      least = std::min(least, num_bytes);
      most = std::max(most, num_bytes);
    }
  }
  return std::any_of(range_of_nic.begin(), range_of_nic.end(), [](const auto& entry) {
    return static_cast<double>(entry.second.second) > kEqualWithin * static_cast<double>(entry.second.first);
  });
}

}  // namespace

std::vector<std::pair<int64_t, int64_t>> pacingRates(const core::ReshardingPlan& plan, int64_t global_rank) {
  if (!plan.topology.links().is_measured || plan.lower_bound_seconds <= 0 || !plan.strategy.starts_with("striped") || relaysBetweenHosts(plan) ||
      !hasUnequalPairs(plan)) {
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
    const double rate = static_cast<double>(num_bytes) / plan.lower_bound_seconds;
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
  if (--num_calls_ == 0) {
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
