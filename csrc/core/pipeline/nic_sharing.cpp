#include "core/pipeline/nic_sharing.h"

#include <algorithm>

namespace xmesh::core {

void NicSharing::start(int32_t id, const NicFlow& flow, double now) {
  active_.push_back({id, flow, now, 0, now});
  is_busy_[pairOf(flow)] = true;
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
      is_busy_[pairOf(active.flow)] = false;
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
  for (size_t i = 0; i < active_.size(); ++i) {
    if (ports[outgoing(i)].num_flows == 1 && ports[incoming(i)].num_flows == 1) {  // shares with nobody
      rates[i] = 1;
      ports[outgoing(i)].num_flows = ports[incoming(i)].num_flows = 0;
    }
  }
  const auto partOf = [&](size_t port) { return ports[port].left / ports[port].num_flows; };
  std::vector<size_t> unfixed;
  for (size_t i = 0; i < active_.size(); ++i) {
    if (rates[i] == 0) {
      unfixed.push_back(i);
    }
  }
  std::vector<size_t> fixed;
  while (!unfixed.empty()) {
    double least = std::numeric_limits<double>::infinity();
    for (const size_t i : unfixed) {
      least = std::min({least, partOf(outgoing(i)), partOf(incoming(i))});
    }
    fixed.clear();
    std::erase_if(unfixed, [&](size_t i) {
      const bool is_fixed = partOf(outgoing(i)) == least || partOf(incoming(i)) == least;
      if (is_fixed) {
        fixed.push_back(i);
      }
      return is_fixed;
    });
    for (const size_t i : fixed) {
      rates[i] = least;
      for (const size_t port : {outgoing(i), incoming(i)}) {
        ports[port].left -= least;
        --ports[port].num_flows;
      }
    }
  }
  return rates;
}

}  // namespace xmesh::core
