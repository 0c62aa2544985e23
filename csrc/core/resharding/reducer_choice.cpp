#include "core/resharding/reducer_choice.h"

#include <algorithm>
#include <tuple>

namespace xmesh::core {

int64_t ReducerChoice::choose(size_t task) {
  const UnitTask& unit = plan_.tasks[task];
  const std::vector<std::vector<int64_t>>& contributions = plan_.holders[static_cast<size_t>(unit.holders)].contributions;
  const std::vector<std::vector<int32_t>>& holder_hosts = hosts_.holders[static_cast<size_t>(unit.holders)];
  using Preference = std::tuple<int64_t, bool, int64_t, int64_t>;  // contributions its host lacks, holds none, bytes so far, rank
  Preference best{0, false, 0, -1};
  for (int64_t needer : plan_.needers[static_cast<size_t>(unit.needers)]) {
    const int32_t rank = network_.rankIndex(needer);
    int64_t lacking = 0;
    bool holds_none = true;
    for (size_t i = 0; i < contributions.size(); ++i) {
      lacking += std::binary_search(holder_hosts[i].begin(), holder_hosts[i].end(), network_.hostOf(rank)) ? 0 : 1;
      holds_none = holds_none && !std::binary_search(contributions[i].begin(), contributions[i].end(), needer);
    }
    const Preference here{lacking, holds_none, rank_bytes_[static_cast<size_t>(rank)], needer};
    best = std::get<3>(best) < 0 || here < best ? here : best;
  }
  rank_bytes_[static_cast<size_t>(network_.rankIndex(std::get<3>(best)))] += numElements(unit.box) * plan_.itemBytes(unit);
  return std::get<3>(best);
}

}  // namespace xmesh::core
