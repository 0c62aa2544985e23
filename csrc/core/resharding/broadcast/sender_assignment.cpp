#include "core/resharding/broadcast/sender_assignment.h"

#include <algorithm>
#include <numeric>

namespace xmesh::core {

std::vector<int32_t> assignSenders(const std::vector<HostTask>& tasks, const std::vector<int64_t>& rates, const std::string& method) {
  std::vector<int32_t> out(tasks.size());
  std::vector<size_t> by_size(tasks.size());
  std::iota(by_size.begin(), by_size.end(), size_t{0});
  std::stable_sort(by_size.begin(), by_size.end(), [&](size_t a, size_t b) { return tasks[a].size > tasks[b].size; });
  std::vector<double> load(rates.size(), 0);
  for (size_t i : by_size) {
    int32_t best = tasks[i].senders.front();
    for (int32_t host : tasks[i].senders) {
      best = method == "size" && load[static_cast<size_t>(host)] < load[static_cast<size_t>(best)] ? host : best;
    }
    load[static_cast<size_t>(best)] += static_cast<double>(tasks[i].size) / static_cast<double>(rates[static_cast<size_t>(best)]);
    out[i] = best;
  }
  return out;
}

}  // namespace xmesh::core
