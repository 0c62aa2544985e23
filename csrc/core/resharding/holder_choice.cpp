#include "core/resharding/holder_choice.h"

#include <tuple>

namespace xmesh::core {

int64_t HolderChoice::choose(const std::vector<int64_t>& holders, int64_t receiver, int64_t num_bytes) {
  const int32_t to_host = network_.hostOfGlobal(receiver);
  using Preference = std::tuple<bool, double, int64_t, int64_t>;  // remote, seconds of its NIC, bytes of the rank, rank
  Preference best{true, 0, 0, -1};
  for (int64_t holder : holders) {
    const int32_t rank = network_.rankIndex(holder);
    const int32_t host = network_.hostOf(rank);
    const bool is_remote = host != to_host;
    const double seconds =
        is_remote ? static_cast<double>(nic_bytes_[static_cast<size_t>(host)]) / static_cast<double>(network_.nicBytesPerS(host)) : 0;
    const Preference here{is_remote, seconds, rank_bytes_[static_cast<size_t>(rank)], holder};
    best = std::get<3>(best) < 0 || here < best ? here : best;
  }
  const int32_t rank = network_.rankIndex(std::get<3>(best));
  rank_bytes_[static_cast<size_t>(rank)] += num_bytes;
  if (std::get<0>(best)) {
    nic_bytes_[static_cast<size_t>(network_.hostOf(rank))] += num_bytes;
  }
  return std::get<3>(best);
}

}  // namespace xmesh::core
