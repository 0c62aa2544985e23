#include "core/resharding/striped/ranks_by_host.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace xmesh::core {

void RanksByHost::addRow(const std::vector<int64_t>& ranks) {
  const size_t begin = hosts_.size();
  for (int64_t rank : ranks) {
    hosts_.push_back(network_.hostOfGlobal(rank));
    ranks_.push_back(rank);
  }
  first_.push_back(hosts_.size());
  if (std::is_sorted(hosts_.begin() + static_cast<std::ptrdiff_t>(begin), hosts_.end())) {
    return;
  }
  std::vector<std::pair<int32_t, int64_t>> sorted;
  for (size_t i = begin; i < hosts_.size(); ++i) {
    sorted.emplace_back(hosts_[i], ranks_[i]);
  }
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    std::tie(hosts_[begin + i], ranks_[begin + i]) = sorted[i];
  }
}

std::span<const int64_t> RanksByHost::at(int64_t row, int32_t host) const {
  const auto begin = hosts_.begin() + static_cast<std::ptrdiff_t>(first_[static_cast<size_t>(row)]);
  const auto end = hosts_.begin() + static_cast<std::ptrdiff_t>(first_[static_cast<size_t>(row) + 1]);
  const auto found = std::lower_bound(begin, end, host);
  size_t count = 0;
  while (found + static_cast<std::ptrdiff_t>(count) != end && found[static_cast<std::ptrdiff_t>(count)] == host) {
    ++count;
  }
  return std::span(ranks_).subspan(static_cast<size_t>(found - hosts_.begin()), count);
}

}  // namespace xmesh::core
