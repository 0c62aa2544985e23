#include "core/resharding/striped/reduction_cutter.h"

#include <algorithm>
#include <tuple>

namespace xmesh::core {
namespace {

bool holdsOne(const std::vector<int32_t>& holders, int32_t host) { return std::binary_search(holders.begin(), holders.end(), host); }

}  // namespace

void ReductionCutter::cut(const SliceClasses& classes, const PartialClass& partial_class, double chunk_bytes, Cut& out) {
  incoming_before_s_ = incoming_s_;
  RangeCutter cutter(plan_, classes.rangesOf(partial_class.slices), out.ranges);
  for (int64_t given = 0; given < partial_class.slices.num_bytes;) {
    Chunk value = cutChunk(cutter, chunk_bytes, partial_class.slices.receivers, out);
    value.owner = partial_class.slices.sources[0];
    given += value.num_bytes;
    const auto value_index = static_cast<int32_t>(out.chunks.size());
    out.chunks.push_back(value);
    if (way_ == ReductionWay::kStar) {
      addStar(partial_class, value_index, out);
    } else {
      addChain(partial_class, value_index, out);
    }
    out.most_partials = std::max(out.most_partials, static_cast<int64_t>(out.chunks.size()) - 1 - value_index);
  }
}

/// The contributions that the owner's host does not hold.
std::vector<int32_t> ReductionCutter::lackingOf(const PartialClass& partial_class) const {
  const std::vector<std::vector<int32_t>>& contributions = hosts_.holders[static_cast<size_t>(partial_class.holders)];
  std::vector<int32_t> out;
  for (size_t i = 0; i < contributions.size(); ++i) {
    if (!holdsOne(contributions[i], partial_class.slices.sources[0])) {
      out.push_back(static_cast<int32_t>(i));
    }
  }
  return out;
}

void ReductionCutter::addStar(const PartialClass& partial_class, int32_t value_index, Cut& out) {
  const int64_t num_bytes = out.chunks[static_cast<size_t>(value_index)].num_bytes;
  for (int32_t contribution : lackingOf(partial_class)) {
    const std::vector<int32_t>& holders = hosts_.holders[static_cast<size_t>(partial_class.holders)][static_cast<size_t>(contribution)];
    const int32_t host = *std::min_element(holders.begin(), holders.end(), [&](int32_t a, int32_t b) {
      return std::pair(outgoing_s_[static_cast<size_t>(a)], a) < std::pair(outgoing_s_[static_cast<size_t>(b)], b);
    });
    addPartial({host, {contribution}}, value_index, num_bytes, out);
  }
}

void ReductionCutter::addChain(const PartialClass& partial_class, int32_t value_index, Cut& out) {
  std::vector<Contributor> chain = chainOf(partial_class);
  const Chunk value = out.chunks[static_cast<size_t>(value_index)];
  const int64_t sum_bytes = accumulatorBytes(plan_, out.rangesOf(value));
  int32_t next = value_index;
  for (size_t k = chain.size(); k-- > 0;) {
    const bool is_sum = k > 0 || chain[k].contributions.size() > 1;
    addPartial(std::move(chain[k]), next, is_sum ? sum_bytes : value.num_bytes, out);
    next = static_cast<int32_t>(out.chunks.size()) - 1;
  }
}

/// Hosts that hold all that the owner lacks, each the one with most of what is left, in the order of the chain.
std::vector<ReductionCutter::Contributor> ReductionCutter::chainOf(const PartialClass& partial_class) const {
  const std::vector<std::vector<int32_t>>& contributions = hosts_.holders[static_cast<size_t>(partial_class.holders)];
  std::vector<Contributor> out;
  std::vector<int32_t> left = lackingOf(partial_class);
  while (!left.empty()) {
    std::vector<int32_t> num_held(outgoing_s_.size(), 0);
    for (int32_t contribution : left) {
      for (int32_t host : contributions[static_cast<size_t>(contribution)]) {
        ++num_held[static_cast<size_t>(host)];
      }
    }
    int32_t best = 0;
    for (int32_t host = 1; host < network_.numHosts(); ++host) {
      const auto keyOf = [&](int32_t h) { return std::tuple(-num_held[static_cast<size_t>(h)], outgoing_s_[static_cast<size_t>(h)], h); };
      best = keyOf(host) < keyOf(best) ? host : best;
    }
    Contributor& added = out.emplace_back();
    added.host = best;
    std::erase_if(left, [&](int32_t contribution) {
      const bool is_held = holdsOne(contributions[static_cast<size_t>(contribution)], best);
      if (is_held) {
        added.contributions.push_back(contribution);
      }
      return is_held;
    });
  }
  std::stable_sort(out.begin(), out.end(), [&](const Contributor& a, const Contributor& b) {
    return std::pair(-incoming_before_s_[static_cast<size_t>(a.host)], a.host) < std::pair(-incoming_before_s_[static_cast<size_t>(b.host)], b.host);
  });
  return out;
}

/// Appends the chunk that `from` sends to the owner of `next_chunk`.
void ReductionCutter::addPartial(Contributor from, int32_t next_chunk, int64_t num_bytes, Cut& out) {
  Chunk& next = out.chunks[static_cast<size_t>(next_chunk)];
  ++next.num_partials;
  next.sources = {};
  Chunk chunk{.first_range = next.first_range, .num_ranges = next.num_ranges, .owner = from.host, .num_bytes = num_bytes};
  chunk.sources = out.host_sets.at(out.host_sets.idOf({from.host}));
  chunk.receivers = out.host_sets.at(out.host_sets.idOf({next.owner}));
  chunk.partial = static_cast<int32_t>(out.partials.size());
  outgoing_s_[static_cast<size_t>(from.host)] += seconds(num_bytes, from.host);
  incoming_s_[static_cast<size_t>(next.owner)] += seconds(num_bytes, next.owner);
  out.partials.push_back({next_chunk, std::move(from.contributions)});
  out.chunks.push_back(chunk);
}

Chunk cutChunk(RangeCutter& cutter, double num_bytes, std::span<const int32_t> receivers, const Cut& out) {
  Chunk chunk{.first_range = static_cast<int64_t>(out.ranges.size())};
  chunk.num_bytes = cutter.take(num_bytes);
  chunk.num_ranges = static_cast<int32_t>(static_cast<int64_t>(out.ranges.size()) - chunk.first_range);
  chunk.receivers = receivers;
  return chunk;
}

int64_t accumulatorBytes(const ReshardingPlan& plan, std::span<const SliceRange> ranges) {
  int64_t out = 0;
  for (const SliceRange& range : ranges) {
    out += (range.end - range.begin) * plan.accumulatorItemBytes(plan.tasks[static_cast<size_t>(range.task)]);
  }
  return out;
}

}  // namespace xmesh::core
