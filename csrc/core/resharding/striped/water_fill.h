#pragma once

#include <cstdint>
#include <vector>

#include "core/resharding/host_load.h"

namespace xmesh::core {

/// How shared loads are spread over the hosts that may send them.
struct FilledLoads {
  std::vector<std::vector<double>> bytes;  ///< [shared load][k-th of its hosts]
  double largest_load_s = 0;               ///< seconds that the busiest host sends
};

/// Water-filling: starts from equal shares and levels one shared load exactly over its hosts per step, in sweeps, until no load is above `target_s`
/// or a sweep changes nothing. Equal to the linear program's optimum within 0.1 % after a few sweeps. Fixed order of doubles: the same everywhere.
FilledLoads waterFill(const std::vector<SharedLoad>& shared_loads, const std::vector<int64_t>& rates, double target_s);

}  // namespace xmesh::core
