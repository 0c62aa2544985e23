#include "core/resharding/dependencies.h"

#include <algorithm>

namespace xmesh::core {
namespace {

struct Received {
  int64_t begin = 0;
  int64_t end = 0;
  int32_t message = 0;
};

/// What one rank has received of one task, ascending by begin.
class Inbox {
 public:
  void clear() {
    received_.clear();
    longest_ = 0;
  }
  void add(const Received& received) {
    longest_ = std::max(longest_, received.end - received.begin);
    if (received_.empty() || received_.back().begin <= received.begin) {
      received_.push_back(received);
      return;
    }
    const auto after = std::upper_bound(received_.begin(), received_.end(), received.begin, [](int64_t b, const Received& r) { return b < r.begin; });
    received_.insert(after, received);
  }
  /// Appends the messages whose elements meet [begin, end).
  void append(int64_t begin, int64_t end, std::vector<int32_t>& out) const {
    auto it = std::upper_bound(received_.begin(), received_.end(), begin - longest_, [](int64_t b, const Received& r) { return b < r.begin; });
    for (; it != received_.end() && it->begin < end; ++it) {
      if (it->end > begin) {
        out.push_back(it->message);
      }
    }
  }

 private:
  std::vector<Received> received_;
  int64_t longest_ = 0;
};

/// Indices of the messages grouped by task, plan order inside a group.
std::vector<int32_t> groupedByTask(const ReshardingPlan& plan, std::vector<int64_t>& first) {
  first.assign(plan.tasks.size() + 1, 0);
  for (const Message& message : plan.messages) {
    ++first[static_cast<size_t>(message.task) + 1];
  }
  for (size_t task = 0; task < plan.tasks.size(); ++task) {
    first[task + 1] += first[task];
  }
  std::vector<int64_t> next(first.begin(), first.end() - 1);
  std::vector<int32_t> out(plan.messages.size());
  for (size_t i = 0; i < plan.messages.size(); ++i) {
    out[static_cast<size_t>(next[static_cast<size_t>(plan.messages[i].task)]++)] = static_cast<int32_t>(i);
  }
  return out;
}

}  // namespace

Dependencies dependenciesOf(const ReshardingPlan& plan, const Network& network) {
  std::vector<int64_t> first;
  const std::vector<int32_t> by_task = groupedByTask(plan, first);
  std::vector<int32_t> slot_of_rank(static_cast<size_t>(network.numRanks()), -1);
  std::vector<int32_t> used;
  std::vector<Inbox> inboxes;
  std::vector<std::pair<int32_t, int32_t>> edges;  // (message, waits for), grouped by message but not ascending over tasks
  std::vector<int32_t> found;
  for (size_t task = 0; task < plan.tasks.size(); ++task) {
    if (first[task + 1] - first[task] < 2) {
      continue;
    }
    for (int64_t k = first[task]; k < first[task + 1]; ++k) {
      const int32_t index = by_task[static_cast<size_t>(k)];
      const Message& message = plan.messages[static_cast<size_t>(index)];
      const int32_t src_slot = slot_of_rank[static_cast<size_t>(network.rankIndex(message.src_rank))];
      if (message.payload != Payload::kContribution && src_slot >= 0) {
        found.clear();
        inboxes[static_cast<size_t>(src_slot)].append(message.begin, message.end, found);
        for (int32_t before : found) {
          edges.emplace_back(index, before);
        }
      }
      int32_t& dst_slot = slot_of_rank[static_cast<size_t>(network.rankIndex(message.dst_rank))];
      if (dst_slot < 0) {
        dst_slot = static_cast<int32_t>(used.size());
        if (used.size() == inboxes.size()) {
          inboxes.emplace_back();
        }
        inboxes[used.size()].clear();
        used.push_back(network.rankIndex(message.dst_rank));
      }
      inboxes[static_cast<size_t>(dst_slot)].add({message.begin, message.end, index});
    }
    for (int32_t rank : used) {
      slot_of_rank[static_cast<size_t>(rank)] = -1;
    }
    used.clear();
  }
  Dependencies out;
  out.first.assign(plan.messages.size() + 1, 0);
  for (const auto& [message, before] : edges) {
    ++out.first[static_cast<size_t>(message) + 1];
  }
  for (size_t i = 0; i < plan.messages.size(); ++i) {
    out.first[i + 1] += out.first[i];
  }
  std::vector<int64_t> next(out.first.begin(), out.first.end() - 1);
  out.messages.resize(edges.size());
  for (const auto& [message, before] : edges) {
    out.messages[static_cast<size_t>(next[static_cast<size_t>(message)]++)] = before;
  }
  return out;
}

}  // namespace xmesh::core
