#include "core/resharding/network.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace xmesh::core {
namespace {

/// The longest time that one port could be busy must fit the ticks with room for sums.
constexpr double kMaxTicks = 1e18;

std::vector<int32_t> hostsOf(const std::vector<int64_t>& global_ranks, const Network& network) {
  std::vector<int32_t> out;
  out.reserve(global_ranks.size());
  for (int64_t rank : global_ranks) {
    out.push_back(network.hostOfGlobal(rank));
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

}  // namespace

Network::Network(const ReshardingPlan& plan) : ranks_(plan.participants()) {
  const LinkModel& links = plan.topology.links();
  for (int64_t rank : ranks_) {
    hosts_.push_back(plan.topology.hostOf(rank));
  }
  const std::vector<int64_t> host_numbers = hosts_;
  std::sort(hosts_.begin(), hosts_.end());
  hosts_.erase(std::unique(hosts_.begin(), hosts_.end()), hosts_.end());
  for (int64_t number : host_numbers) {
    host_of_.push_back(static_cast<int32_t>(std::lower_bound(hosts_.begin(), hosts_.end(), number) - hosts_.begin()));
  }
  if (!ranks_.empty() && ranks_.back() < static_cast<int64_t>(ranks_.size()) * 16 + 1024) {
    dense_.assign(static_cast<size_t>(ranks_.back()) + 1, -1);
    for (size_t i = 0; i < ranks_.size(); ++i) {
      dense_[static_cast<size_t>(ranks_[i])] = static_cast<int32_t>(i);
    }
  }
  double slowest = static_cast<double>(links.local_bytes_per_s);
  for (int64_t host : hosts_) {
    rates_.push_back(plan.topology.nicBytesPerS(host));
    slowest = std::min(slowest, static_cast<double>(rates_.back()));
  }
  double num_bytes = 0;
  for (const TensorPair& pair : plan.tensors) {
    num_bytes += static_cast<double>(pair.src.numBytes());
  }
  const double num_messages = num_bytes * static_cast<double>(ranks_.size() + 1);
  const double longest_s = num_messages / slowest + 1e-6 * (links.message_us + links.latency_us + links.local_latency_us) * 1e7;
  ticks_per_s_ = std::min(1e12, kMaxTicks / longest_s);
  for (int64_t rate : rates_) {
    ticks_per_byte_.push_back(ticks_per_s_ / static_cast<double>(rate));
  }
  local_ticks_per_byte_ = ticks_per_s_ / static_cast<double>(links.local_bytes_per_s);
  const double ticks_per_us = ticks_per_s_ * 1e-6;
  message_ticks_ = static_cast<int64_t>(links.message_us * ticks_per_us);
  latency_ticks_ = static_cast<int64_t>(links.latency_us * ticks_per_us);
  local_latency_ticks_ = static_cast<int64_t>(links.local_latency_us * ticks_per_us);
}

int32_t Network::rankIndex(int64_t global_rank) const {
  if (!dense_.empty()) {
    return dense_.at(static_cast<size_t>(global_rank));
  }
  return static_cast<int32_t>(std::lower_bound(ranks_.begin(), ranks_.end(), global_rank) - ranks_.begin());
}

Network::Cost Network::cost(int32_t src, int32_t dst, int64_t num_bytes) const {
  const int32_t src_host = hostOf(src);
  const int32_t dst_host = hostOf(dst);
  if (src_host == dst_host) {
    const auto ticks = static_cast<int64_t>(std::ceil(static_cast<double>(num_bytes) * local_ticks_per_byte_));
    return {numHosts() + src, numHosts() + dst, ticks, ticks, local_latency_ticks_};
  }
  return nicCost(src_host, dst_host, num_bytes, 1);
}

Network::Cost Network::nicCost(int32_t src_host, int32_t dst_host, int64_t num_bytes, int64_t num_messages) const {
  const auto bytes = static_cast<double>(num_bytes);
  const int64_t overhead = message_ticks_ * num_messages;
  const auto send = static_cast<int64_t>(std::ceil(bytes * ticks_per_byte_[static_cast<size_t>(src_host)]));
  const auto recv = static_cast<int64_t>(std::ceil(bytes * ticks_per_byte_[static_cast<size_t>(dst_host)]));
  return {src_host, dst_host, overhead + send, overhead + recv, latency_ticks_};
}

HostSets::HostSets(const ReshardingPlan& plan, const Network& network) {
  holders.reserve(plan.holders.size());
  for (const Holders& of_slice : plan.holders) {
    std::vector<std::vector<int32_t>>& hosts = holders.emplace_back();
    for (const std::vector<int64_t>& ranks : of_slice.contributions) {
      hosts.push_back(hostsOf(ranks, network));
    }
  }
  needers.reserve(plan.needers.size());
  for (const std::vector<int64_t>& ranks : plan.needers) {
    needers.push_back(hostsOf(ranks, network));
  }
}

Timeline::Timeline(ReshardingPlan& plan, const Network& network)
    : plan_(plan), network_(network), send_free_(static_cast<size_t>(network.numPorts())), recv_free_(static_cast<size_t>(network.numPorts())) {}

int64_t Timeline::place(const Message& message, int64_t ready_ticks) {
  const Network::Cost cost = network_.cost(network_.rankIndex(message.src_rank), network_.rankIndex(message.dst_rank), plan_.numBytes(message));
  int64_t& send_free = send_free_[static_cast<size_t>(cost.send_port)];
  int64_t& recv_free = recv_free_[static_cast<size_t>(cost.recv_port)];
  const int64_t start = std::max({ready_ticks, send_free, recv_free});
  send_free = start + cost.send_ticks;
  recv_free = start + cost.recv_ticks;
  starts_.push_back(start);
  messages_.push_back(message);
  return start + std::max(cost.send_ticks, cost.recv_ticks) + cost.flight_ticks;
}

void Timeline::finish() {
  std::vector<size_t> order(messages_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return starts_[a] < starts_[b]; });
  plan_.messages.reserve(plan_.messages.size() + order.size());
  for (size_t i : order) {
    plan_.messages.push_back(messages_[i]);
  }
}

}  // namespace xmesh::core
