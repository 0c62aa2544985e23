#include "core/resharding/network.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace xmesh::core {
namespace {

/// The longest time that one port could be busy must fit the ticks with room for sums.
constexpr double kMaxTicks = 1e18;

/// Indices in ascending order of their keys, which are not negative; equal keys keep their order.
std::vector<uint32_t> orderOf(const std::vector<int64_t>& keys) {
  constexpr size_t kFew = 2048;
  constexpr int kDigitBits = 11;
  constexpr uint64_t kDigits = uint64_t{1} << kDigitBits;
  std::vector<uint32_t> order(keys.size());
  std::iota(order.begin(), order.end(), uint32_t{0});
  if (keys.size() < kFew) {
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return keys[a] < keys[b]; });
    return order;
  }
  struct Entry {
    uint64_t key;
    uint32_t index;
  };
  std::vector<Entry> entries(keys.size());
  std::vector<Entry> sorted(keys.size());
  uint64_t bits = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    entries[i] = {static_cast<uint64_t>(keys[i]), static_cast<uint32_t>(i)};
    bits |= entries[i].key;
  }
  for (int shift = 0; shift < 64 && bits >> shift != 0; shift += kDigitBits) {
    std::vector<size_t> next(kDigits + 1, 0);
    for (const Entry& entry : entries) {
      ++next[(entry.key >> shift & (kDigits - 1)) + 1];
    }
    std::partial_sum(next.begin(), next.end(), next.begin());
    for (const Entry& entry : entries) {
      sorted[next[entry.key >> shift & (kDigits - 1)]++] = entry;
    }
    entries.swap(sorted);
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    order[i] = entries[i].index;
  }
  return order;
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

Timeline::Timeline(ReshardingPlan& plan, const Network& network)
    : plan_(plan), network_(network), send_free_(static_cast<size_t>(network.numPorts())), recv_free_(static_cast<size_t>(network.numPorts())) {}

int64_t Timeline::add(const Message& message, int64_t ready_ticks) {
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

void Timeline::reserve(size_t num_messages) {
  starts_.reserve(num_messages);
  messages_.reserve(num_messages);
}

void Timeline::finish() {
  if (plan_.messages.empty() && std::is_sorted(starts_.begin(), starts_.end())) {
    plan_.messages = std::move(messages_);
    return;
  }
  const std::vector<uint32_t> order = orderOf(starts_);
  plan_.messages.reserve(plan_.messages.size() + order.size());
  for (uint32_t i : order) {
    plan_.messages.push_back(messages_[i]);
  }
}

}  // namespace xmesh::core
