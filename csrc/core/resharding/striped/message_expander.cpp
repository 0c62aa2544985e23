#include "core/resharding/striped/message_expander.h"

#include <algorithm>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/resharding/host_sets.h"
#include "core/resharding/striped/ranks_by_host.h"

namespace xmesh::core {
namespace {

using Ranks = std::vector<int64_t>;

bool has(std::span<const int64_t> ranks, int64_t rank) { return std::binary_search(ranks.begin(), ranks.end(), rank); }

class MessageExpander {
 public:
  MessageExpander(ReshardingPlan& plan, const Network& network, const Cut& cut)
      : plan_(plan),
        network_(network),
        cut_(cut),
        hosts_(plan, network),
        needers_(network),
        holders_(network),
        timeline_(plan, network),
        partials_left_(cut.chunks.size()),
        first_slot_(cut.chunks.size()) {
    only_hops_.reserve(cut.chunks.size());
    for (const Ranks& ranks : plan.needers) {
      needers_.addRow(ranks);
    }
    int64_t num_rows = 0;
    for (const Holders& of_slice : plan.holders) {
      first_holder_row_.push_back(num_rows);
      num_rows += static_cast<int64_t>(of_slice.contributions.size());
      for (const Ranks& ranks : of_slice.contributions) {
        holders_.addRow(ranks);
      }
    }
    size_t num_slots = 0;
    for (size_t i = 0; i < cut.chunks.size(); ++i) {
      const Chunk& chunk = cut.chunks[i];
      partials_left_[i] = chunk.num_partials;
      first_slot_[i] = num_slots;
      only_hops_.push_back(onlyHop(chunk));
      num_slots += only_hops_.back().from < 0 ? 1 + chunk.sources.size() + chunk.receivers.size() : 0;
    }
    ready_.assign(num_slots, kUnknown);
  }

  void expand(const std::vector<ChunkHop>& hops) {
    timeline_.reserve(hops.size());
    for (size_t i = 0; i < hops.size(); ++i) {
      const ChunkHop& hop = hops[i];
      fetchAhead(hops, i);
      if (cut_.chunks[static_cast<size_t>(hop.chunk)].partial < 0) {
        ship(hop);
      } else {
        sendPartial(hop);
      }
    }
    for (size_t i = 0; i < cut_.chunks.size(); ++i) {
      if (only_hops_[i].from >= 0) {
        continue;
      }
      const Chunk& chunk = cut_.chunks[i];
      for (int32_t host : chunk.sources) {
        if (chunk.partial < 0) {
          readyAt(static_cast<int32_t>(i), host);
        }
      }
      if (chunk.num_partials == 0 && chunk.sources.empty()) {
        readyAt(static_cast<int32_t>(i), chunk.owner);
      }
    }
    timeline_.finish();
  }

 private:
  static constexpr int64_t kUnknown = -1;

  /// All that becomes of a chunk that is one range and moves from one rank to one rank; else from == -1.
  struct RankHop {
    int32_t from = -1;
    int32_t to = -1;
  };

  RankHop onlyHop(const Chunk& chunk) {
    if (chunk.num_ranges != 1 || chunk.sources.size() != 1 || chunk.receivers.size() != 1) {
      return {};
    }
    const SliceRange& range = cut_.rangesOf(chunk)[0];
    if (concerns(range, chunk.owner)) {
      return {};
    }
    const Ranks& chain = chainAt(range.task, chunk.receivers[0]);
    if (chain.size() != 1) {
      return {};
    }
    const auto to = static_cast<int32_t>(chain.front());
    return {static_cast<int32_t>(rankWith(range.task, chunk.owner)), to};
  }

  /// Hops refer to chunks far from each other: has the memory of the next ones brought near, each step when the one before has come.
  void fetchAhead(const std::vector<ChunkHop>& hops, size_t i) const {
    constexpr size_t kStep = 6;
    if (i + 3 * kStep < hops.size()) {
      __builtin_prefetch(&cut_.chunks[static_cast<size_t>(hops[i + 3 * kStep].chunk)]);
      __builtin_prefetch(&cut_.ranges[firstRange(hops[i + 2 * kStep])]);
      const auto task = static_cast<size_t>(cut_.ranges[firstRange(hops[i + kStep])].task);
      __builtin_prefetch(&plan_.tasks[task]);
      __builtin_prefetch(&only_hops_[static_cast<size_t>(hops[i + kStep].chunk)]);
    }
  }
  size_t firstRange(const ChunkHop& hop) const { return static_cast<size_t>(cut_.chunks[static_cast<size_t>(hop.chunk)].first_range); }

  const UnitTask& unit(int32_t task) const { return plan_.tasks[static_cast<size_t>(task)]; }
  const std::vector<Ranks>& contributionsOf(int32_t task) const { return plan_.holders[static_cast<size_t>(unit(task).holders)].contributions; }

  /// The ranks of a host that hold a contribution to a task.
  std::span<const int64_t> holdersAt(int32_t task, size_t contribution, int32_t host) const {
    return holders_.at(first_holder_row_[static_cast<size_t>(unit(task).holders)] + static_cast<int64_t>(contribution), host);
  }

  /// The needers of a task at a host in the order in which they get it there. First the rank that takes it from outside, or the reducing one:
  /// one that holds a contribution if there is one. Tasks take turns.
  void findChain(int32_t task, int32_t host, Ranks& chain) const {
    const std::span<const int64_t> needers = needers_.at(unit(task).needers, host);
    chain.assign(needers.begin(), needers.end());
    const std::vector<Ranks>& contributions = contributionsOf(task);
    if (contributions.size() == 1) {
      const std::span<const int64_t> holders = holdersAt(task, 0, host);
      std::erase_if(chain, [&](int64_t rank) { return has(holders, rank); });
    }
    if (chain.size() > 1) {
      std::rotate(chain.begin(), chain.begin() + task % static_cast<int32_t>(chain.size()), chain.end());
    }
    if (contributions.size() > 1) {
      std::stable_partition(chain.begin(), chain.end(), [&](int64_t rank) {
        return std::any_of(contributions.begin(), contributions.end(), [&](const Ranks& ranks) { return has(ranks, rank); });
      });
    }
  }

  /// The chain of a task at a host. Valid until the next call: those of slices with one contribution are found anew, which costs no more than
  /// their messages.
  const Ranks& chainAt(int32_t task, int32_t host) {
    if (contributionsOf(task).size() == 1) {
      findChain(task, host, chain_);
      return chain_;
    }
    const auto [entry, is_new] = partial_chains_.try_emplace(static_cast<int64_t>(task) * network_.numHosts() + host);
    if (is_new) {
      findChain(task, host, entry->second);
    }
    return entry->second;
  }

  /// `carried` tells payload and contribution.
  int64_t carry(const SliceRange& range, int64_t src, int64_t dst, Message carried, int64_t ready) {
    carried.task = range.task;
    carried.begin = range.begin;
    carried.end = range.end;
    carried.src_rank = static_cast<int32_t>(src);
    carried.dst_rank = static_cast<int32_t>(dst);
    return timeline_.add(carried, ready);
  }
  static Message contributionMessage(int32_t contribution) { return {.contribution = contribution, .payload = Payload::kContribution}; }

  /// From rank `from` along the chain, beginning with its rank number `next`; returns when that one has it.
  int64_t passOn(const SliceRange& range, int64_t from, const Ranks& chain, size_t next, int64_t ready) {
    int64_t with_next = ready;
    for (size_t i = next; i < chain.size(); ++i) {
      ready = carry(range, from, chain[i], {}, ready);
      with_next = i == next ? ready : with_next;
      from = chain[i];
    }
    return with_next;
  }

  /// The rank of a host that has the task once it is there.
  int64_t rankWith(int32_t task, int32_t host) {
    if (contributionsOf(task).size() == 1) {
      const std::span<const int64_t> holders = holdersAt(task, 0, host);
      if (!holders.empty()) {
        return holders[static_cast<size_t>(task) % holders.size()];
      }
    }
    return chainAt(task, host).front();
  }

  /// The rank from which a task leaves a host. Where no rank that holds it needs it, what goes to several hosts leaves from a needer, as what is
  /// passed on leaves a receiver: so each two hosts have few connections of even load, and nothing waits to be passed on behind the slowest of many.
  int64_t senderOf(const Chunk& chunk, int32_t task, int32_t host) {
    if (chunk.receivers.size() > 1 && contributionsOf(task).size() == 1) {
      const Ranks& chain = chainAt(task, host);
      if (!chain.empty() && chain.size() == needers_.at(unit(task).needers, host).size()) {
        return chain.front();
      }
    }
    return rankWith(task, host);
  }

  /// When a host has a chunk, kUnknown while that is not settled.
  int64_t& ready(int32_t index, int32_t host) {
    const Chunk& chunk = cut_.chunks[static_cast<size_t>(index)];
    const size_t first = first_slot_[static_cast<size_t>(index)];
    size_t slot = 1;
    for (const std::span<const int32_t> hosts : {chunk.sources, chunk.receivers}) {
      const auto found = std::lower_bound(hosts.begin(), hosts.end(), host);
      if (found != hosts.end() && *found == host) {
        return ready_[first + slot + static_cast<size_t>(found - hosts.begin())];
      }
      slot += hosts.size();
    }
    return ready_[first];  // a reduced value comes from its owner
  }

  /// Whether a host does anything with a range but hold and send it: some rank there needs it, or contributions are reduced.
  bool concerns(const SliceRange& range, int32_t host) const {
    const std::vector<int32_t>& needing = hosts_.needers[static_cast<size_t>(unit(range.task).needers)];
    return contributionsOf(range.task).size() > 1 || std::binary_search(needing.begin(), needing.end(), host);
  }

  /// When a host has a chunk. At a source it is made so on the first call: local contributions reduced, local needers served.
  int64_t readyAt(int32_t index, int32_t host) {
    const Chunk& chunk = cut_.chunks[static_cast<size_t>(index)];
    const std::span<const SliceRange> ranges = cut_.rangesOf(chunk);
    if (std::none_of(ranges.begin(), ranges.end(), [&](const SliceRange& range) { return concerns(range, host); })) {
      return 0;
    }
    int64_t& settled = ready(index, host);
    if (settled != kUnknown) {
      return settled;
    }
    settled = 0;
    for (const SliceRange& range : ranges) {
      if (contributionsOf(range.task).size() == 1) {
        const int64_t with_first = passOn(range, rankWith(range.task, host), chainAt(range.task, host), 0, 0);
        settled = std::max(settled, has(contributionsOf(range.task)[0], senderOf(chunk, range.task, host)) ? 0 : with_first);
        continue;
      }
      const Ranks& chain = chainAt(range.task, host);
      const int64_t reduced = gatherLocally(range, chain.front(), host);
      passOn(range, chain.front(), chain, 1, reduced);
      settled = std::max(settled, reduced);
    }
    return settled;
  }

  /// Brings the contributions that the host's other ranks hold to its reducing rank.
  int64_t gatherLocally(const SliceRange& range, int64_t reducer, int32_t host) {
    int64_t ready = 0;
    const std::vector<Ranks>& contributions = contributionsOf(range.task);
    for (size_t i = 0; i < contributions.size(); ++i) {
      const std::span<const int64_t> holders = holdersAt(range.task, i, host);
      if (!holders.empty() && !has(contributions[i], reducer)) {
        const auto turn = static_cast<size_t>(range.task) % holders.size();
        ready = std::max(ready, carry(range, holders[turn], reducer, contributionMessage(static_cast<int32_t>(i)), 0));
      }
    }
    return ready;
  }

  void ship(const ChunkHop& hop) {
    const Chunk& chunk = cut_.chunks[static_cast<size_t>(hop.chunk)];
    const RankHop& only = only_hops_[static_cast<size_t>(hop.chunk)];
    if (only.from >= 0) {
      carry(cut_.rangesOf(chunk)[0], only.from, only.to, {}, 0);
      return;
    }
    const int64_t since = readyAt(hop.chunk, hop.src_host);
    int64_t there = 0;
    for (const SliceRange& range : cut_.rangesOf(chunk)) {
      const int64_t from = senderOf(chunk, range.task, hop.src_host);
      const Ranks& chain = chainAt(range.task, hop.dst_host);
      const int64_t arrival = carry(range, from, chain.front(), {}, since);
      passOn(range, chain.front(), chain, 1, arrival);
      there = std::max(there, arrival);
    }
    ready(hop.chunk, hop.dst_host) = there;
  }

  const PartialChunk& partialOf(int32_t chunk) const { return cut_.partials[static_cast<size_t>(cut_.chunks[static_cast<size_t>(chunk)].partial)]; }

  /// The rank of a host that adds up a partial chunk: one that holds one of its contributions. Tasks take turns.
  int64_t addingRank(const PartialChunk& partial, int32_t task, int32_t host) const {
    const size_t count = partial.contributions.size();
    const auto turn = static_cast<size_t>(task);
    const std::span<const int64_t> holders = holdersAt(task, static_cast<size_t>(partial.contributions[turn % count]), host);
    return holders[turn / count % holders.size()];
  }

  /// Brings a partial chunk's contributions that other ranks of the host hold to the rank that adds them up.
  int64_t gatherPartial(const PartialChunk& partial, const SliceRange& range, int64_t adder, int32_t host) {
    int64_t ready = 0;
    for (int32_t contribution : partial.contributions) {
      const std::span<const int64_t> holders = holdersAt(range.task, static_cast<size_t>(contribution), host);
      if (!has(holders, adder)) {
        ready = std::max(ready, carry(range, holders[static_cast<size_t>(range.task) % holders.size()], adder, contributionMessage(contribution), 0));
      }
    }
    return ready;
  }

  void sendPartial(const ChunkHop& hop) {
    const Chunk& chunk = cut_.chunks[static_cast<size_t>(hop.chunk)];
    const PartialChunk& partial = partialOf(hop.chunk);
    const bool is_last = cut_.chunks[static_cast<size_t>(partial.next_chunk)].partial < 0;
    const int64_t since = chunk.num_partials > 0 ? partials_there_.at(hop.chunk) : 0;
    const bool is_sum = chunk.num_partials > 0 || partial.contributions.size() > 1;
    const Message carried = is_sum ? Message{.payload = Payload::kPartialSum} : contributionMessage(partial.contributions.front());
    int64_t& there = partials_there_[partial.next_chunk];
    for (const SliceRange& range : cut_.rangesOf(chunk)) {
      const int64_t from = addingRank(partial, range.task, hop.src_host);
      const int64_t to = is_last ? chainAt(range.task, hop.dst_host).front() : addingRank(partialOf(partial.next_chunk), range.task, hop.dst_host);
      const int64_t ready = std::max(since, gatherPartial(partial, range, from, hop.src_host));
      there = std::max(there, carry(range, from, to, carried, ready));
    }
    if (--partials_left_[static_cast<size_t>(partial.next_chunk)] == 0 && is_last) {
      finishValue(partial.next_chunk, hop.dst_host, there);
    }
  }

  /// The partial chunks of a value are with its owner from `there` on.
  void finishValue(int32_t value_chunk, int32_t host, int64_t there) {
    const std::span<const SliceRange> ranges = cut_.rangesOf(cut_.chunks[static_cast<size_t>(value_chunk)]);
    for (const SliceRange& range : ranges) {
      there = std::max(there, gatherLocally(range, chainAt(range.task, host).front(), host));
    }
    for (const SliceRange& range : ranges) {
      const Ranks& chain = chainAt(range.task, host);
      passOn(range, chain.front(), chain, 1, there);
    }
    ready(value_chunk, host) = there;
  }

  ReshardingPlan& plan_;
  const Network& network_;
  const Cut& cut_;
  HostSets hosts_;
  RanksByHost needers_;                    ///< by row of the plan's table
  RanksByHost holders_;                    ///< by contribution, those of one row of the plan's table together
  std::vector<int64_t> first_holder_row_;  ///< by row of the plan's table
  Timeline timeline_;
  std::vector<int32_t> partials_left_;
  std::unordered_map<int32_t, int64_t> partials_there_;  ///< when the last partial chunk so far is there, by the chunk that it is added to
  std::vector<RankHop> only_hops_;                       ///< by chunk
  std::vector<size_t> first_slot_;                       ///< by chunk: where its times in ready_ begin: its owner's, its sources', its receivers'
  std::vector<int64_t> ready_;
  std::unordered_map<int64_t, Ranks> partial_chains_;  ///< by task and host
  Ranks chain_;
};

}  // namespace

void expandHops(ReshardingPlan& plan, const Network& network, const Cut& cut, const std::vector<ChunkHop>& hops) {
  MessageExpander(plan, network, cut).expand(hops);
}

}  // namespace xmesh::core
