#include "core/resharding/striped/ring_gather.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <limits>
#include <numeric>
#include <queue>
#include <span>
#include <utility>

namespace xmesh::core {
namespace {

constexpr int32_t kNone = -1;
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

/// Hosts united by chunks that they all lack.
class RingFinder {
 public:
  explicit RingFinder(int32_t num_hosts) : parent_(static_cast<size_t>(num_hosts)) { std::iota(parent_.begin(), parent_.end(), 0); }

  void unite(std::span<const int32_t> hosts) {
    for (int32_t host : hosts) {
      parent_[static_cast<size_t>(rootOf(host))] = rootOf(hosts[0]);
    }
  }
  int32_t rootOf(int32_t host) {
    while (parent_[static_cast<size_t>(host)] != host) {
      host = parent_[static_cast<size_t>(host)] = parent_[static_cast<size_t>(parent_[static_cast<size_t>(host)])];
    }
    return host;
  }

 private:
  std::vector<int32_t> parent_;
};

/// Ascending hosts of each ring, by its root.
std::vector<std::vector<int32_t>> findRings(const std::vector<Chunk>& chunks, const std::vector<int32_t>& indices, RingFinder& finder,
                                            int32_t num_hosts) {
  std::vector<bool> is_receiver(static_cast<size_t>(num_hosts), false);
  for (int32_t index : indices) {
    const Chunk& chunk = chunks[static_cast<size_t>(index)];
    finder.unite(chunk.receivers);
    for (int32_t host : chunk.receivers) {
      is_receiver[static_cast<size_t>(host)] = true;
    }
  }
  std::vector<std::vector<int32_t>> rings(static_cast<size_t>(num_hosts));
  for (int32_t host = 0; host < num_hosts; ++host) {
    if (is_receiver[static_cast<size_t>(host)]) {
      rings[static_cast<size_t>(finder.rootOf(host))].push_back(host);
    }
  }
  return rings;
}

bool has(const Chunk& chunk, int32_t host) { return std::binary_search(chunk.sources.begin(), chunk.sources.end(), host); }

/// Whether every host of the ring that has not got the chunk lacks it.
bool isGather(const Chunk& chunk, const std::vector<int32_t>& ring) {
  const auto num_sources = std::count_if(ring.begin(), ring.end(), [&](int32_t host) { return has(chunk, host); });
  return std::cmp_equal(ring.size(), static_cast<size_t>(num_sources) + chunk.receivers.size());
}

/// Event-driven, by receiving port. Times are in bytes: a port moves one in one unit.
class RingScheduler {
 public:
  RingScheduler(const std::vector<Chunk>& chunks, int32_t num_hosts) : chunks_(chunks), ports_(static_cast<size_t>(num_hosts)) {}

  void addRing(const std::vector<int32_t>& ring) {
    for (size_t i = 0; i < ring.size(); ++i) {
      port(ring[(i + 1) % ring.size()]).before = ring[i];
      port(ring[i]).after = ring[(i + 1) % ring.size()];
      lookAt(ring[i], 0);
    }
  }

  void addChunk(int32_t index, const std::vector<int32_t>& ring) {
    const Chunk& chunk = chunks_[static_cast<size_t>(index)];
    bool is_inside = false;
    for (int32_t host : ring) {
      if (has(chunk, host)) {
        is_inside = true;
        keep({index, kNone, 0}, host);
      }
    }
    if (is_inside) {
      return;
    }
    const int32_t entry = ring[static_cast<size_t>(port(chunk.owner).num_fed++) % ring.size()];
    std::vector<Feed>& feeds = port(entry).feeds;
    const auto found = std::find_if(feeds.begin(), feeds.end(), [&](const Feed& feed) { return feed.host == chunk.owner; });
    (found == feeds.end() ? feeds.emplace_back(Feed{chunk.owner, {}}) : *found).chunks.push_back(index);
  }

  std::vector<ChunkHop> run() {
    while (!turns_.empty()) {
      const auto [now, host] = turns_.top();
      turns_.pop();
      if (port(host).next_look != now) {
        continue;
      }
      port(host).next_look = kNever;
      if (port(host).receives_until > now) {
        lookAt(host, port(host).receives_until);
      } else if (!takeFed(host, now)) {
        takeFromRing(host, now);
      }
    }
    return std::move(out_);
  }

 private:
  struct Held {
    int32_t chunk = 0;
    int32_t entry = kNone;  ///< where it came into the ring from outside
    int64_t since = 0;
  };
  /// Chunks that a host outside the ring brings in at one port.
  struct Feed {
    int32_t host = 0;
    std::deque<int32_t> chunks;
  };
  struct Port {
    int32_t before = kNone;
    int32_t after = kNone;
    int64_t sends_until = 0;
    int64_t receives_until = 0;
    int64_t next_look = kNever;  ///< when it looks for something to take; other turns are void
    std::deque<Held> to_pass_on;
    std::vector<Feed> feeds;
    int64_t num_fed = 0;  ///< chunks that this host brings into rings
  };

  Port& port(int32_t host) { return ports_[static_cast<size_t>(host)]; }

  void lookAt(int32_t host, int64_t time) {
    if (time < port(host).next_look) {
      port(host).next_look = time;
      turns_.emplace(time, host);
    }
  }

  void keep(const Held& held, int32_t host) {
    const int32_t after = port(host).after;
    if (after != held.entry && !has(chunks_[static_cast<size_t>(held.chunk)], after)) {
      port(host).to_pass_on.push_back(held);
      lookAt(after, held.since);
    }
  }

  /// What comes from outside goes first: the ring has yet to pass it on.
  bool takeFed(int32_t host, int64_t now) {
    std::vector<Feed>& feeds = port(host).feeds;
    for (size_t i = 0; i < feeds.size(); ++i) {
      const int32_t from = feeds[i].host;
      if (port(from).sends_until > now) {
        lookAt(host, port(from).sends_until);
        continue;
      }
      const int32_t index = feeds[i].chunks.front();
      feeds[i].chunks.pop_front();
      std::rotate(feeds.begin() + static_cast<std::ptrdiff_t>(i), feeds.begin() + static_cast<std::ptrdiff_t>(i) + 1, feeds.end());
      if (feeds.back().chunks.empty()) {
        feeds.pop_back();
      }
      hop({index, host, now}, from, host);
      return true;
    }
    return false;
  }

  void takeFromRing(int32_t host, int64_t now) {
    Port& before = port(port(host).before);
    if (before.to_pass_on.empty()) {
      return;  // a turn comes with what arrives there
    }
    const Held held = before.to_pass_on.front();
    if (const int64_t from = std::max(before.sends_until, held.since); from > now) {
      lookAt(host, from);
      return;
    }
    before.to_pass_on.pop_front();
    hop({held.chunk, held.entry, now}, port(host).before, host);
  }

  void hop(Held held, int32_t from, int32_t to) {
    out_.push_back({held.chunk, from, to});
    const int64_t end = held.since + chunks_[static_cast<size_t>(held.chunk)].num_bytes;
    port(from).sends_until = end;
    port(to).receives_until = end;
    lookAt(to, end);
    held.since = end;
    keep(held, to);
  }

  using Turn = std::pair<int64_t, int32_t>;  ///< when a receiving port looks for something to take
  const std::vector<Chunk>& chunks_;
  std::vector<Port> ports_;
  std::priority_queue<Turn, std::vector<Turn>, std::greater<>> turns_;
  std::vector<ChunkHop> out_;
};

}  // namespace

std::vector<ChunkHop> ringGathers(const std::vector<Chunk>& chunks, const std::vector<int32_t>& indices, int32_t num_hosts) {
  constexpr size_t kMostHops = 100'000;
  size_t num_hops = 0;
  RingFinder finder(num_hosts);
  const std::vector<std::vector<int32_t>> rings = findRings(chunks, indices, finder, num_hosts);
  const auto ring_of = [&](int32_t index) -> const std::vector<int32_t>& {
    return rings[static_cast<size_t>(finder.rootOf(chunks[static_cast<size_t>(index)].receivers[0]))];
  };
  for (int32_t index : indices) {
    const Chunk& chunk = chunks[static_cast<size_t>(index)];
    num_hops += chunk.receivers.size();
    if (!isGather(chunk, ring_of(index)) || num_hops > kMostHops) {
      return {};
    }
  }
  RingScheduler scheduler(chunks, num_hosts);
  for (const std::vector<int32_t>& ring : rings) {
    scheduler.addRing(ring);
  }
  for (int32_t index : indices) {
    scheduler.addChunk(index, ring_of(index));
  }
  return scheduler.run();
}

}  // namespace xmesh::core
