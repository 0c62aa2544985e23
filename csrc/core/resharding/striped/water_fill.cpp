#include "core/resharding/striped/water_fill.h"

#include <algorithm>
#include <cmath>

namespace xmesh::core {
namespace {

constexpr int kMaxSweeps = 40;

/// Pours the shared load's mass over its hosts, whose other loads are `load_s`, up to one level; returns the largest change of a share in bytes.
double level(const SharedLoad& shared, const std::vector<int64_t>& rates, std::vector<double>& load_s, std::vector<double>& bytes) {
  const auto rateOf = [&](size_t k) { return static_cast<double>(rates[static_cast<size_t>(shared.hosts[k])]); };
  std::vector<double> base(bytes.size());
  std::vector<size_t> order(bytes.size());
  for (size_t k = 0; k < bytes.size(); ++k) {
    base[k] = load_s[static_cast<size_t>(shared.hosts[k])] - bytes[k] / rateOf(k);
    order[k] = k;
  }
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return base[a] < base[b] || (base[a] == base[b] && a < b); });
  double filled_rate = 0;
  double weighted = 0;
  double height = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    filled_rate += rateOf(order[i]);
    weighted += rateOf(order[i]) * base[order[i]];
    height = (static_cast<double>(shared.mass) + weighted) / filled_rate;
    if (i + 1 == order.size() || height <= base[order[i + 1]]) {
      break;
    }
  }
  double change = 0;
  for (size_t k = 0; k < bytes.size(); ++k) {
    const double share = std::max(0.0, (height - base[k]) * rateOf(k));
    change = std::max(change, std::abs(share - bytes[k]));
    bytes[k] = share;
    load_s[static_cast<size_t>(shared.hosts[k])] = base[k] + share / rateOf(k);
  }
  return change;
}

}  // namespace

FilledLoads waterFill(const std::vector<SharedLoad>& shared_loads, const std::vector<int64_t>& rates, double target_s) {
  FilledLoads out;
  std::vector<double> load_s(rates.size(), 0);
  double total = 0;
  for (const SharedLoad& shared : shared_loads) {
    const double share = static_cast<double>(shared.mass) / static_cast<double>(shared.hosts.size());
    out.bytes.emplace_back(shared.hosts.size(), share);
    total += static_cast<double>(shared.mass);
    for (int32_t host : shared.hosts) {
      load_s[static_cast<size_t>(host)] += share / static_cast<double>(rates[static_cast<size_t>(host)]);
    }
  }
  for (int sweep = 0; sweep < kMaxSweeps && *std::max_element(load_s.begin(), load_s.end()) > target_s; ++sweep) {
    double change = 0;
    for (size_t i = 0; i < shared_loads.size(); ++i) {
      if (shared_loads[i].hosts.size() > 1) {
        change = std::max(change, level(shared_loads[i], rates, load_s, out.bytes[i]));
      }
    }
    if (change <= 1e-6 * total) {
      break;
    }
  }
  out.largest_load_s = load_s.empty() ? 0 : *std::max_element(load_s.begin(), load_s.end());
  return out;
}

}  // namespace xmesh::core
