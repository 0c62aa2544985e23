#include "core/resharding/host_sets.h"

#include <algorithm>

namespace xmesh::core {
namespace {

/// A PairIndex makes no larger table (of 4-byte numbers).
constexpr int64_t kLargestTable = int64_t{1} << 24;

std::vector<int32_t> hostsOf(const std::vector<int64_t>& global_ranks, const Network& network) {
  std::vector<int32_t> out;
  out.reserve(global_ranks.size());
  for (int64_t rank : global_ranks) {
    out.push_back(network.hostOfGlobal(rank));
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

template <typename Row>
int32_t numberRows(const std::vector<Row>& rows, std::vector<int32_t>& ids) {
  std::map<Row, int32_t> id_of;
  ids.reserve(rows.size());
  for (const Row& row : rows) {
    ids.push_back(id_of.try_emplace(row, static_cast<int32_t>(id_of.size())).first->second);
  }
  return static_cast<int32_t>(id_of.size());
}

}  // namespace

HostSets::HostSets(const ReshardingPlan& plan, const Network& network) {
  holders.reserve(plan.holders.size());
  for (const Holders& of_slice : plan.holders) {
    std::vector<std::vector<int32_t>>& hosts = holders.emplace_back();
    for (const std::vector<int64_t>& ranks : of_slice.contributions) {
      hosts.push_back(hostsOf(ranks, network));
    }
  }
  needers.reserve(plan.needers.size());
  for (const std::vector<int64_t>& ranks : plan.needers) {
    needers.push_back(hostsOf(ranks, network));
  }
  num_holder_ids = numberRows(holders, holder_ids);
  num_needer_ids = numberRows(needers, needer_ids);
}

PairIndex::PairIndex(int64_t num_first, int64_t num_second) {
  if (num_first > 0 && num_second > 0 && num_first <= kLargestTable / num_second) {
    num_first_ = num_first;
    num_second_ = num_second;
    table_.assign(static_cast<size_t>(num_first * num_second), -1);
  }
}

std::pair<int32_t, bool> PairIndex::idOf(int32_t first, int32_t second) {
  const bool is_in_table = first < num_first_ && second < num_second_;
  int32_t& id =
      is_in_table ? table_[static_cast<size_t>(first * num_second_ + second)] : others_.try_emplace(int64_t{first} << 32 | second, -1).first->second;
  const bool is_new = id < 0;
  if (is_new) {
    id = size_++;
  }
  return {id, is_new};
}

int32_t HostSetTable::idOf(const std::vector<int32_t>& hosts) {
  const auto [entry, is_new] = ids_.try_emplace(hosts, static_cast<int32_t>(sets_.size()));
  if (is_new) {
    sets_.push_back(&entry->first);
  }
  return entry->second;
}

}  // namespace xmesh::core
