#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace xmesh::core {

/// A unit task between hosts (dense indices): one of `senders` occupies its send port and all of `receivers` their receive ports for `size`.
struct HostTask {
  int64_t size = 0;
  std::vector<int32_t> senders;    ///< hosts that hold the slice, ascending
  std::vector<int32_t> receivers;  ///< hosts that receive it, ascending
};

/// Who sends each task, and in which order the tasks start.
struct HostSchedule {
  std::vector<int32_t> order;   ///< task indices
  std::vector<int32_t> sender;  ///< host by task
  int64_t makespan = 0;
};

/// AlpaComm's model (MLSys'23, section 3.2): minimize max_i S_i + T_i (Eq. 1) with the sender among the holders (Eq. 2) and no two tasks at once that
/// share the sender or a receiver (Eq. 3). Send and receive ports are apart (full duplex). With the order given, each task starts as
/// soon as the tasks before it on its ports have ended.
int64_t makespan(const std::vector<HostTask>& tasks, const std::vector<int32_t>& order, const std::vector<int32_t>& sender, int32_t num_hosts);

/// How the search for an order is bounded: both count evaluated placements, so that no clock decides.
struct OrderSearch {
  std::string method = "best";  ///< "naive" (the given order), "dfs", "greedy", or "best" of these
  int64_t seed = 0;
  int64_t node_budget = 20'000;
};

/// Orders the tasks and settles their senders among the candidates, starting from `initial` senders; never worse than the initial order.
HostSchedule orderTasks(const std::vector<HostTask>& tasks, const std::vector<int32_t>& initial_sender, int32_t num_hosts, const OrderSearch& search);

}  // namespace xmesh::core
