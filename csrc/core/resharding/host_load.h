#pragma once

#include <cstdint>
#include <vector>

namespace xmesh::core {

/// Bytes that some of these hosts (dense indices, ascending) must send between them.
struct SharedLoad {
  std::vector<int32_t> hosts;
  int64_t mass = 0;
};

/// A quotient of bytes and rate, kept exact.
struct LoadRatio {
  int64_t mass = 0;
  int64_t rate = 1;
  double seconds() const { return static_cast<double>(mass) / static_cast<double>(rate); }
};

/// The least possible largest load when every shared load may be split freely over its hosts:
///   max over host sets U of (mass of the shared loads inside U) / (rates of U),
/// or `at_least` where that is more. Exact: Dinkelbach's iteration over maximum flows in 128-bit integers.
LoadRatio worstHostSet(const std::vector<SharedLoad>& shared_loads, const std::vector<int64_t>& rates, LoadRatio at_least);

/// bytes[i][k]: what the k-th host of shared load i sends in some split with no load above `bound`, which must be feasible. Every row sums to the
/// mass.
std::vector<std::vector<int64_t>> splitWithin(const std::vector<SharedLoad>& shared_loads, const std::vector<int64_t>& rates, LoadRatio bound);

}  // namespace xmesh::core
