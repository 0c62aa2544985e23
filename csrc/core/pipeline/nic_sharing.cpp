#include "core/pipeline/nic_sharing.h"

#include <algorithm>

namespace xmesh::core {

bool NicSharing::isBusy(const NicFlow& flow) const {
  return std::any_of(active_.begin(), active_.end(), [&](const Active& other) { return other.flow.from == flow.from && other.flow.to == flow.to; });
}

void NicSharing::start(int32_t id, const NicFlow& flow, double now) {
  active_.push_back({id, flow, now, 0, now});
  has_changed_ = true;
}

void NicSharing::share(double now) {
  if (!has_changed_) {
    return;
  }
  has_changed_ = false;
  next_end_s_ = std::numeric_limits<double>::infinity();
  const std::vector<double> rates = fairRates();
  for (size_t i = 0; i < active_.size(); ++i) {
    Active& active = active_[i];
    if (rates[i] != active.rate) {
      active.flow.seconds = std::max(0.0, active.flow.seconds - active.rate * (now - active.since_s));
      active.since_s = now;
      active.rate = rates[i];
      active.end_s = now + active.flow.seconds / active.rate;
    }
    next_end_s_ = std::min(next_end_s_, active.end_s);
  }
}

std::vector<int32_t> NicSharing::endedBy(double now) {
  std::vector<int32_t> ended;
  if (now < next_end_s_) {
    return ended;
  }
  has_changed_ = true;
  for (const Active& active : active_) {
    if (active.end_s <= now) {
      ended.push_back(active.id);
    }
  }
  std::erase_if(active_, [&](const Active& active) { return active.end_s <= now; });
  return ended;
}

/// Progressive filling: the directions of NICs that leave their flows least fix their rates, again and again.
std::vector<double> NicSharing::fairRates() const {
  struct Port {
    double left = 1;
    int32_t num_flows = 0;
  };
  std::vector<Port> ports(2 * static_cast<size_t>(num_places_));  // outgoing, then incoming
  const auto outgoing = [&](size_t flow) { return static_cast<size_t>(active_[flow].flow.from); };
  const auto incoming = [&](size_t flow) { return static_cast<size_t>(num_places_ + active_[flow].flow.to); };
  for (size_t i = 0; i < active_.size(); ++i) {
    ++ports[outgoing(i)].num_flows;
    ++ports[incoming(i)].num_flows;
  }
  std::vector<double> rates(active_.size(), 0);
  size_t num_fixed = 0;
  for (size_t i = 0; i < active_.size(); ++i) {
    if (ports[outgoing(i)].num_flows == 1 && ports[incoming(i)].num_flows == 1) {  // shares with nobody
      rates[i] = 1;
      ports[outgoing(i)].num_flows = ports[incoming(i)].num_flows = 0;
      ++num_fixed;
    }
  }
  std::vector<double> parts(ports.size());
  while (num_fixed < active_.size()) {
    double least = std::numeric_limits<double>::infinity();
    for (size_t port = 0; port < ports.size(); ++port) {
      parts[port] = ports[port].num_flows > 0 ? ports[port].left / ports[port].num_flows : std::numeric_limits<double>::infinity();
      least = std::min(least, parts[port]);
    }
    for (size_t i = 0; i < active_.size(); ++i) {
      if (rates[i] == 0 && (parts[outgoing(i)] == least || parts[incoming(i)] == least)) {
        rates[i] = least;
        ++num_fixed;
        for (const size_t port : {outgoing(i), incoming(i)}) {
          ports[port].left -= least;
          --ports[port].num_flows;
        }
      }
    }
  }
  return rates;
}

}  // namespace xmesh::core
