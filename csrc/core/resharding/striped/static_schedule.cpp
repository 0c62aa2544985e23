#include "core/resharding/striped/static_schedule.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <span>
#include <tuple>
#include <utility>

#include "core/resharding/striped/ring_gather.h"

namespace xmesh::core {
namespace {

/// Chunks that a process receives in the rounds of one phase of the circulant graph; negative: of the phase before.
class ReceiveSchedule {
 public:
  explicit ReceiveSchedule(int32_t num_processes) : num_processes_(num_processes) {
    const auto rounds = static_cast<size_t>(std::bit_width(static_cast<uint32_t>(num_processes - 1)));
    skip_.assign(rounds + 2, 0);
    skip_[rounds] = num_processes;
    for (size_t k = rounds; k-- > 0;) {
      skip_[k] = (skip_[k + 1] + 1) / 2;
    }
    skip_[rounds + 1] = 2 * num_processes;
  }

  int32_t numRounds() const { return static_cast<int32_t>(skip_.size()) - 2; }
  int32_t skip(int32_t round) const { return skip_[static_cast<size_t>(round)]; }

  std::vector<int32_t> chunksOf(int32_t process) {
    const int32_t q = numRounds();
    // A doubly linked list q, q - 1, ..., 0 of the skips not yet used; index e + 1, so that -1 is its anchor.
    next_.assign(static_cast<size_t>(q) + 2, 0);
    previous_.assign(static_cast<size_t>(q) + 2, 0);
    for (int32_t e = 0; e <= q; ++e) {
      next(e) = e - 1;
      previous(e) = e + 1;
    }
    previous(q) = -1;
    next(-1) = q;
    previous(-1) = 0;
    const int32_t base = baseChunk(process);
    unlink(base);
    chunks_.assign(static_cast<size_t>(q), 0);
    limit_ = 2 * num_processes_;
    descend(num_processes_ + process, 0, q, 0);
    for (int32_t& chunk : chunks_) {
      chunk = chunk == q ? base : chunk - q;
    }
    return chunks_;
  }

 private:
  int32_t& next(int32_t e) { return next_[static_cast<size_t>(e + 1)]; }
  int32_t& previous(int32_t e) { return previous_[static_cast<size_t>(e + 1)]; }
  void unlink(int32_t e) {
    next(previous(e)) = next(e);
    previous(next(e)) = previous(e);
  }

  /// The smallest skip on the greedy way from process 0; of process 0 itself the number of rounds.
  int32_t baseChunk(int32_t process) const {
    for (int32_t k = numRounds() - 1; k >= 0 && process > 0; --k) {
      if (skip(k) == process) {
        return k;
      }
      process -= skip(k) < process ? skip(k) : 0;
    }
    return numRounds();
  }

  /// Depth-first over sums of skips below `process`, finding for each round k the first one within [skip(k), skip(k + 1)] before it.
  int32_t descend(int32_t process, int32_t reached, int32_t e, int32_t k) {
    while (e != -1 && k < numRounds()) {
      const int32_t further = reached + skip(e);
      if (further <= process - skip(k) && further < limit_) {
        if (further <= process - skip(k + 1)) {
          k = descend(process, further, e, k);
        }
        if (k >= numRounds() || reached > process - skip(k + 1)) {
          return k;
        }
        limit_ = further;
        chunks_[static_cast<size_t>(k++)] = e;
        unlink(e);
      }
      e = next(e);
    }
    return k;
  }

  int32_t num_processes_;
  std::vector<int32_t> skip_;
  std::vector<int32_t> next_;
  std::vector<int32_t> previous_;
  std::vector<int32_t> chunks_;
  int32_t limit_ = 0;
};

/// Whether two spans of one HostSetTable are the same set; the table keeps equal sets once.
bool isSame(std::span<const int32_t> a, std::span<const int32_t> b) { return a.data() == b.data() && a.size() == b.size(); }

bool haveSameHosts(const std::vector<Chunk>& chunks, const std::vector<int32_t>& indices) {
  const Chunk& first = chunks[static_cast<size_t>(indices[0])];
  return std::all_of(indices.begin(), indices.end(), [&](int32_t index) {
    const Chunk& chunk = chunks[static_cast<size_t>(index)];
    return isSame(chunk.sources, first.sources) && isSame(chunk.receivers, first.receivers);
  });
}

/// How many broadcasts take turns: with one a chunk that has just come must go on at once, and every round waits for the latency; with w a chunk
/// has w - 1 rounds to arrive, but the pipeline is w times as deep.
int32_t numTurns(const Cut& cut, const Network& network, const LinkModel& links, size_t num_chunks, size_t num_processes) {
  const double chunk_s = static_cast<double>(cut.max_chunk_bytes) / static_cast<double>(network.nicBytesPerS(0)) + 1e-6 * links.message_us;
  const double latency_s = 1e-6 * links.latency_us;
  const auto chunks = static_cast<double>(num_chunks);
  const auto depth = static_cast<double>(std::bit_width(num_processes - 1));
  const double turns = 1 + std::ceil(latency_s / chunk_s);
  const double together_s = (chunks - 1 + depth) * (chunk_s + latency_s);
  const double in_turns_s = (chunks + turns * (depth - 1)) * chunk_s;
  return in_turns_s < together_s && turns <= chunks ? static_cast<int32_t>(turns) : 1;
}

std::vector<ChunkHop> groupBroadcasts(const std::vector<int32_t>& indices, const Chunk& chunk, int32_t turns) {
  const size_t num_groups = std::min(chunk.sources.size(), chunk.receivers.size());
  std::vector<std::tuple<int32_t, size_t, ChunkHop>> ordered;  // round, group
  for (size_t group = 0; group < num_groups; ++group) {
    std::vector<int32_t> hosts = {chunk.sources[group]};
    for (size_t k = group; k < chunk.receivers.size(); k += num_groups) {
      hosts.push_back(chunk.receivers[k]);
    }
    for (int32_t turn = 0; turn < turns; ++turn) {
      const int32_t num_chunks = (static_cast<int32_t>(indices.size()) - turn + turns - 1) / turns;
      for (const BroadcastHop& hop : circulantBroadcast(static_cast<int32_t>(hosts.size()), num_chunks)) {
        ordered.emplace_back(hop.round * turns + turn, group,
                             ChunkHop{indices[static_cast<size_t>(hop.chunk * turns + turn)], hosts[static_cast<size_t>(hop.from)],
                                      hosts[static_cast<size_t>(hop.to)]});
      }
    }
  }
  std::stable_sort(ordered.begin(), ordered.end(),
                   [](const auto& a, const auto& b) { return std::tie(std::get<0>(a), std::get<1>(a)) < std::tie(std::get<0>(b), std::get<1>(b)); });
  std::vector<ChunkHop> out;
  out.reserve(ordered.size());
  for (const auto& [round, group, hop] : ordered) {
    out.push_back(hop);
  }
  return out;
}

/// Positions of the hosts in use among these, by host; -1 elsewhere.
std::vector<int32_t> denseIndices(const std::vector<bool>& is_used, int32_t& count) {
  std::vector<int32_t> out(is_used.size(), -1);
  count = 0;
  for (size_t host = 0; host < is_used.size(); ++host) {
    if (is_used[host]) {
      out[host] = count++;
    }
  }
  return out;
}

/// Stable counting sort of positions by their small numbers.
std::vector<int32_t> sortedBy(const std::vector<int32_t>& positions, const std::vector<int32_t>& numbers, int32_t num_numbers) {
  std::vector<size_t> next(static_cast<size_t>(num_numbers) + 1, 0);
  for (int32_t position : positions) {
    ++next[static_cast<size_t>(numbers[static_cast<size_t>(position)]) + 1];
  }
  std::partial_sum(next.begin(), next.end(), next.begin());
  std::vector<int32_t> out(positions.size());
  for (int32_t position : positions) {
    out[next[static_cast<size_t>(numbers[static_cast<size_t>(position)])]++] = position;
  }
  return out;
}

std::vector<ChunkHop> rotation(const Cut& cut, const std::vector<int32_t>& indices, int32_t num_hosts) {
  std::vector<ChunkHop> hops;
  hops.reserve(indices.size());
  std::vector<bool> sends(static_cast<size_t>(num_hosts), false);
  std::vector<bool> receives(sends);
  for (int32_t index : indices) {
    const Chunk& chunk = cut.chunks[static_cast<size_t>(index)];
    hops.push_back({index, chunk.owner, chunk.receivers[0]});
    sends[static_cast<size_t>(chunk.owner)] = true;
    receives[static_cast<size_t>(chunk.receivers[0])] = true;
  }
  int32_t num_senders = 0;
  int32_t num_receivers = 0;
  const std::vector<int32_t> sender_index = denseIndices(sends, num_senders);
  const std::vector<int32_t> receiver_index = denseIndices(receives, num_receivers);
  const int32_t num_steps = std::max(num_senders, num_receivers);
  std::vector<int32_t> sender_of;
  std::vector<int32_t> step_of;
  for (const ChunkHop& hop : hops) {
    const int32_t sender = sender_index[static_cast<size_t>(hop.src_host)];
    sender_of.push_back(sender);
    step_of.push_back((receiver_index[static_cast<size_t>(hop.dst_host)] - sender + num_steps) % num_steps);
  }
  std::vector<int32_t> positions(hops.size());
  std::iota(positions.begin(), positions.end(), 0);
  positions = sortedBy(sortedBy(positions, sender_of, num_senders), step_of, num_steps);
  std::vector<ChunkHop> out;
  out.reserve(hops.size());
  for (int32_t position : positions) {
    out.push_back(hops[static_cast<size_t>(position)]);
  }
  return out;
}

}  // namespace

std::vector<BroadcastHop> circulantBroadcast(int32_t num_processes, int32_t num_chunks) {
  std::vector<BroadcastHop> out;
  if (num_processes < 2 || num_chunks < 1) {
    return out;
  }
  ReceiveSchedule schedule(num_processes);
  const int32_t q = schedule.numRounds();
  std::vector<std::vector<int32_t>> chunks;
  for (int32_t process = 0; process < num_processes; ++process) {
    chunks.push_back(schedule.chunksOf(process));
  }
  const int32_t idle_rounds = (q - (num_chunks - 1) % q) % q;
  for (int32_t round = idle_rounds; round < num_chunks - 1 + q + idle_rounds; ++round) {
    const int32_t k = round % q;
    for (int32_t to = 1; to < num_processes; ++to) {
      const int32_t chunk = std::min(num_chunks - 1, chunks[static_cast<size_t>(to)][static_cast<size_t>(k)] + round - k - idle_rounds);
      if (chunk >= 0) {
        out.push_back({round - idle_rounds, chunk, (to + num_processes - schedule.skip(k)) % num_processes, to});
      }
    }
  }
  return out;
}

StaticHops staticHops(const Cut& cut, const Network& network, const LinkModel& links) {
  std::vector<int32_t> indices;  // the chunks that move between hosts
  bool has_one_receiver = true;
  for (size_t i = 0; i < cut.chunks.size(); ++i) {
    const Chunk& chunk = cut.chunks[i];
    if (chunk.partial >= 0 || chunk.num_partials > 0) {
      return {};
    }
    if (!chunk.receivers.empty()) {
      indices.push_back(static_cast<int32_t>(i));
      has_one_receiver = has_one_receiver && chunk.receivers.size() == 1;
    }
  }
  for (int32_t host = 1; host < network.numHosts(); ++host) {
    if (network.nicBytesPerS(host) != network.nicBytesPerS(0)) {
      return {};
    }
  }
  if (indices.empty()) {
    return {};
  }
  if (has_one_receiver) {
    return {rotation(cut, indices, network.numHosts()), false, false};
  }
  if (!haveSameHosts(cut.chunks, indices)) {
    std::vector<ChunkHop> ring = ringGathers(cut.chunks, indices, network.numHosts());
    const bool is_ring = !ring.empty();
    return {std::move(ring), false, is_ring};
  }
  const Chunk& chunk = cut.chunks[static_cast<size_t>(indices[0])];
  const size_t num_groups = std::min(chunk.sources.size(), chunk.receivers.size());
  const size_t largest_group = (chunk.receivers.size() + num_groups - 1) / num_groups + 1;
  return {groupBroadcasts(indices, chunk, numTurns(cut, network, links, indices.size(), largest_group)), largest_group > 2, false};
}

}  // namespace xmesh::core
