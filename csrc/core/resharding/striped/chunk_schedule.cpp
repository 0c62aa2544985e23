#include "core/resharding/striped/chunk_schedule.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <queue>
#include <set>
#include <tuple>
#include <utility>

#include "core/resharding/striped/chunk_set.h"
#include "core/resharding/striped/port_matching.h"

namespace xmesh::core {
namespace {

/// How many chunks a sender weighs for one message, and how many receivers.
constexpr size_t kMostChunksWeighed = 96;
constexpr size_t kMostReceiversWeighed = 64;

enum class EventKind : uint8_t { kSendFree, kRecvFree, kArrival };

struct Arrival {
  int64_t tick = 0;
  EventKind kind = EventKind::kArrival;
  int32_t chunk = -1;
  int32_t host = 0;
  bool operator>(const Arrival& other) const { return std::tie(tick, chunk, host, kind) > std::tie(other.tick, other.chunk, other.host, other.kind); }
};

class Scheduler {
 public:
  Scheduler(const Cut& cut, const Network& network, const ScheduleTaste& taste)
      : cut_(cut),
        network_(network),
        taste_(taste),
        num_hosts_(network.numHosts()),
        have_(static_cast<size_t>(num_hosts_), ChunkSet(cut.chunks.size())),
        need_(have_),
        owned_(have_),
        fresh_(cut.chunks.size()),
        to_come_(static_cast<size_t>(num_hosts_), 0),
        owed_(static_cast<size_t>(num_hosts_), 0),
        is_new_sender_(static_cast<size_t>(num_hosts_), false),
        is_new_receiver_(static_cast<size_t>(num_hosts_), false),
        copies_(cut.chunks.size(), 0),
        waits_for_(cut.chunks.size(), 0),
        left_(cut.chunks.size(), 0) {
    for (size_t i = 0; i < cut.chunks.size(); ++i) {
      enter(static_cast<int32_t>(i), cut.chunks[i]);
    }
  }

  std::vector<ChunkHop> run() {
    int64_t now = 0;
    for (int32_t host = 0; host < num_hosts_; ++host) {
      freeSender(host);
      freeReceiver(host);
    }
    match(now);
    while (!events_.empty()) {
      now = events_.top().tick;
      while (!events_.empty() && events_.top().tick == now) {
        handle(events_.top());
        events_.pop();
      }
      match(now);
      if (events_.empty() && !free_receivers_.empty()) {  // what held a sender back may have changed elsewhere
        new_senders_.assign(idle_senders_.begin(), idle_senders_.end());
        match(now);
      }
    }
    return std::move(out_);
  }

 private:
  /// What a sender could send a receiver now.
  struct Offer {
    int32_t receiver = -1;
    bool has_first_copy = false;
    double weight = 0;
  };

  void enter(int32_t index, const Chunk& chunk) {
    for (int32_t host : chunk.sources) {
      have_[static_cast<size_t>(host)].insert(index);
    }
    for (int32_t host : chunk.receivers) {
      need_[static_cast<size_t>(host)].insert(index);
      to_come_[static_cast<size_t>(host)] += chunk.num_bytes;
    }
    if (!chunk.receivers.empty()) {
      owned_[static_cast<size_t>(chunk.owner)].insert(index);
      owed_[static_cast<size_t>(chunk.owner)] += chunk.num_bytes;
      fresh_.insert(index);
    }
    copies_[static_cast<size_t>(index)] = static_cast<int32_t>(chunk.sources.size());
    left_[static_cast<size_t>(index)] = static_cast<int32_t>(chunk.receivers.size());
    waits_for_[static_cast<size_t>(index)] = chunk.num_partials;
  }

  void arrive(int32_t index, int32_t host) {
    const Chunk& chunk = cut_.chunks[static_cast<size_t>(index)];
    if (chunk.partial < 0) {
      have_[static_cast<size_t>(host)].insert(index);
      return;
    }
    const int32_t next = cut_.partials[static_cast<size_t>(chunk.partial)].next_chunk;
    if (--waits_for_[static_cast<size_t>(next)] == 0) {
      have_[static_cast<size_t>(host)].insert(next);
      ++copies_[static_cast<size_t>(next)];
    }
  }

  void handle(const Arrival& event) {
    if (event.kind == EventKind::kSendFree) {
      freeSender(event.host);
    } else if (event.kind == EventKind::kRecvFree) {
      freeReceiver(event.host);
    } else {
      arrive(event.chunk, event.host);
      if (idle_senders_.contains(event.host)) {
        new_senders_.push_back(event.host);
      }
    }
  }

  void freeSender(int32_t host) {
    idle_senders_.insert(host);
    new_senders_.push_back(host);
  }

  void freeReceiver(int32_t host) {
    if (to_come_[static_cast<size_t>(host)] > 0) {
      free_receivers_.insert({-seconds(to_come_, host), host});
      is_new_receiver_[static_cast<size_t>(host)] = true;
      new_receivers_.push_back(host);
    }
  }

  /// Pairs free ports of which one fell free or got a chunk since the last call; other pairs had nothing to offer then.
  void match(int64_t now) {
    std::vector<int32_t> senders = new_senders_;
    if (!new_receivers_.empty()) {
      senders.assign(idle_senders_.begin(), idle_senders_.end());
    }
    std::sort(senders.begin(), senders.end());
    senders.erase(std::unique(senders.begin(), senders.end()), senders.end());
    for (int32_t host : new_senders_) {
      is_new_sender_[static_cast<size_t>(host)] = true;
    }
    if (!free_receivers_.empty() && !senders.empty()) {
      std::stable_sort(senders.begin(), senders.end(), [&](int32_t a, int32_t b) { return seconds(owed_, a) > seconds(owed_, b); });
      if (taste_.is_matched && idle_senders_.size() > 1 && free_receivers_.size() > 1) {
        matchTogether(now);
      } else {
        matchOneByOne(senders, now);
      }
    }
    for (int32_t host : new_senders_) {
      is_new_sender_[static_cast<size_t>(host)] = false;
    }
    for (int32_t host : new_receivers_) {
      is_new_receiver_[static_cast<size_t>(host)] = false;
    }
    new_senders_.clear();
    new_receivers_.clear();
  }

  void matchOneByOne(const std::vector<int32_t>& senders, int64_t now) {
    for (int32_t sender : senders) {
      const Offer best = bestOffer(sender);
      if (best.receiver >= 0) {
        send(sender, best.receiver, now);
      }
      if (free_receivers_.empty()) {
        return;
      }
    }
  }

  /// As many pairs as possible, among these those with first copies and with most to come.
  void matchTogether(int64_t now) {
    std::vector<int32_t> senders(idle_senders_.begin(), idle_senders_.end());
    std::stable_sort(senders.begin(), senders.end(), [&](int32_t a, int32_t b) { return seconds(owed_, a) > seconds(owed_, b); });
    std::vector<int32_t> receivers;
    for (const auto& [seconds_to_come, host] : free_receivers_) {
      receivers.push_back(host);
    }
    const double longest = std::max(1e-30, seconds(to_come_, receivers.front()));
    std::vector<std::vector<double>> weights(senders.size(), std::vector<double>(receivers.size(), 0));
    for (size_t i = 0; i < senders.size(); ++i) {
      for (size_t j = 0; j < receivers.size(); ++j) {
        const Offer here = senders[i] == receivers[j] ? Offer{} : offer(senders[i], receivers[j]);
        if (here.receiver >= 0) {
          weights[i][j] = 1 + (here.has_first_copy ? 0.5 : 0) + 0.4 * here.weight / longest;
        }
      }
    }
    const std::vector<int32_t> column_of = heaviestMatching(weights);
    for (size_t i = 0; i < senders.size(); ++i) {
      if (column_of[i] >= 0) {
        send(senders[i], receivers[static_cast<size_t>(column_of[i])], now);
      }
    }
  }

  double seconds(const std::vector<int64_t>& bytes, int32_t host) const {
    return static_cast<double>(bytes[static_cast<size_t>(host)]) / static_cast<double>(network_.nicBytesPerS(host));
  }

  /// Whether a holder that is not the owner may send a first copy to the receiver.
  bool maySendForOwner(int32_t chunk, int32_t receiver) const {
    const int32_t owner = cut_.chunks[static_cast<size_t>(chunk)].owner;
    return owed_[static_cast<size_t>(owner)] > to_come_[static_cast<size_t>(receiver)] - cut_.max_chunk_bytes;
  }

  bool isRelay(int32_t chunk, int32_t receiver) const {
    const int32_t relay = cut_.chunks[static_cast<size_t>(chunk)].relay;
    return relay < 0 || relay == receiver;
  }

  Offer bestOffer(int32_t sender) const {
    Offer best;
    size_t count = 0;
    for (const auto& [seconds_to_come, receiver] : free_receivers_) {
      if (++count > kMostReceiversWeighed) {
        break;
      }
      if (receiver == sender || (!is_new_sender_[static_cast<size_t>(sender)] && !is_new_receiver_[static_cast<size_t>(receiver)])) {
        continue;
      }
      const Offer here = offer(sender, receiver);
      if (here.receiver >= 0 && (best.receiver < 0 || std::tie(here.has_first_copy, here.weight) > std::tie(best.has_first_copy, best.weight))) {
        best = here;
      }
    }
    return best;
  }

  Offer offer(int32_t sender, int32_t receiver) const {
    Offer out;
    int64_t bytes = 0;
    forEachCandidate(sender, receiver, [&](int32_t chunk, bool is_own) {
      out.receiver = receiver;
      out.has_first_copy = out.has_first_copy || is_own;
      bytes += cut_.chunks[static_cast<size_t>(chunk)].num_bytes;
      return bytes < cut_.max_chunk_bytes || !out.has_first_copy;
    });
    const double fill = std::min(1.0, static_cast<double>(bytes) / static_cast<double>(cut_.max_chunk_bytes));
    out.weight = seconds(to_come_, receiver) * (1 - taste_.fill_weight + taste_.fill_weight * fill);
    return out;
  }

  /// Calls visit(chunk, is own first copy) for what the sender may send the receiver, own first copies before repeats, until it returns false.
  template <typename Visit>
  void forEachCandidate(int32_t sender, int32_t receiver, Visit visit) const {
    const ChunkSet& have = have_[static_cast<size_t>(sender)];
    const ChunkSet& need = need_[static_cast<size_t>(receiver)];
    const ChunkSet& owned = owned_[static_cast<size_t>(sender)];
    for (const bool own_round : {true, false}) {
      for (size_t k = 0; k < have.numSummaryWords(); ++k) {
        uint64_t words = have.summaryWord(k) & need.summaryWord(k);
        for (words &= own_round ? owned.summaryWord(k) : words; words != 0; words &= words - 1) {
          const size_t i = k * 64 + static_cast<size_t>(std::countr_zero(words));
          const uint64_t all = have.word(i) & need.word(i);
          const uint64_t own = all & fresh_.word(i) & owned.word(i);
          if (!visitWord(i, own_round ? own : all & ~own, own_round, receiver, visit)) {
            return;
          }
        }
      }
    }
  }

  /// forEachCandidate for the chunks of one word; false when visit wants no more.
  template <typename Visit>
  bool visitWord(size_t word, uint64_t bits, bool is_own, int32_t receiver, Visit& visit) const {
    for (; bits != 0; bits &= bits - 1) {
      const auto chunk = static_cast<int32_t>(word * 64 + static_cast<size_t>(std::countr_zero(bits)));
      if (taste_.uses_relays && fresh_.contains(chunk) && !isRelay(chunk, receiver)) {
        continue;
      }
      if (!is_own && fresh_.contains(chunk) && !maySendForOwner(chunk, receiver)) {
        continue;
      }
      if (!visit(chunk, is_own)) {
        return false;
      }
    }
    return true;
  }

  /// Sorts candidates: repeats after own first copies, then by rarity, then by chunk, either way.
  uint64_t rankOf(int32_t chunk, bool is_own) const {
    constexpr int64_t kMiddle = int64_t{1} << 30;
    const auto index = static_cast<size_t>(chunk);
    const int32_t rarity = is_own ? -left_[index] : copies_[index];
    const bool is_reversed = !is_own && taste_.is_newest_first;
    const uint32_t low = is_reversed ? ~static_cast<uint32_t>(chunk) : static_cast<uint32_t>(chunk);
    return uint64_t{!is_own} << 63 | static_cast<uint64_t>(kMiddle + rarity) << 32 | low;
  }

  int32_t chunkOf(uint64_t rank) const {
    const bool is_reversed = rank >> 63 != 0 && taste_.is_newest_first;
    const auto low = static_cast<uint32_t>(rank);
    return static_cast<int32_t>(is_reversed ? ~low : low);
  }

  void send(int32_t sender, int32_t receiver, int64_t now) {
    std::vector<uint64_t>& ranked = ranked_;
    ranked.clear();
    int64_t smallest = cut_.max_chunk_bytes;
    forEachCandidate(sender, receiver, [&](int32_t chunk, bool is_own) {
      ranked.push_back(rankOf(chunk, is_own));
      smallest = std::min(smallest, cut_.chunks[static_cast<size_t>(chunk)].num_bytes);
      return ranked.size() < kMostChunksWeighed;
    });
    std::make_heap(ranked.begin(), ranked.end(), std::greater<>());
    int64_t bytes = 0;
    int64_t num_messages = 0;
    std::vector<int32_t>& sent = sent_;
    sent.clear();
    for (; !ranked.empty() && (sent.empty() || bytes + smallest <= cut_.max_chunk_bytes); ranked.pop_back()) {
      const int32_t chunk = chunkOf(ranked.front());
      const int64_t more = cut_.chunks[static_cast<size_t>(chunk)].num_bytes;
      if (sent.empty() || bytes + more <= cut_.max_chunk_bytes) {
        sent.push_back(chunk);
        bytes += more;
        num_messages += cut_.chunks[static_cast<size_t>(chunk)].num_ranges;
      }
      std::pop_heap(ranked.begin(), ranked.end(), std::greater<>());
    }
    const Network::Cost cost = network_.nicCost(sender, receiver, bytes, num_messages);
    const int64_t there = now + std::max(cost.send_ticks, cost.recv_ticks) + cost.flight_ticks;
    idle_senders_.erase(sender);
    free_receivers_.erase({-seconds(to_come_, receiver), receiver});
    for (int32_t chunk : sent) {
      dispatch(chunk, sender, receiver);
      events_.push({there, EventKind::kArrival, chunk, receiver});
    }
    events_.push({now + cost.send_ticks, EventKind::kSendFree, -1, sender});
    events_.push({now + cost.recv_ticks, EventKind::kRecvFree, -1, receiver});
  }

  void dispatch(int32_t chunk, int32_t sender, int32_t receiver) {
    const auto index = static_cast<size_t>(chunk);
    const Chunk& shipped = cut_.chunks[index];
    out_.push_back({chunk, sender, receiver});
    need_[static_cast<size_t>(receiver)].erase(chunk);
    to_come_[static_cast<size_t>(receiver)] -= shipped.num_bytes;
    ++copies_[index];
    --left_[index];
    if (fresh_.contains(chunk)) {
      fresh_.erase(chunk);
      owed_[static_cast<size_t>(shipped.owner)] -= shipped.num_bytes;
    }
  }

  const Cut& cut_;
  const Network& network_;
  const ScheduleTaste& taste_;
  int32_t num_hosts_;
  std::vector<ChunkSet> have_;
  std::vector<ChunkSet> need_;  ///< still to be sent to the host
  std::vector<ChunkSet> owned_;
  ChunkSet fresh_;  ///< chunks of which no copy was sent
  std::vector<int64_t> to_come_;
  std::vector<int64_t> owed_;
  std::set<int32_t> idle_senders_;
  std::set<std::pair<double, int32_t>> free_receivers_;  ///< with something to come, the one with most first
  std::vector<int32_t> new_senders_;                     ///< since the last match: fell free, or idle and got a chunk
  std::vector<int32_t> new_receivers_;
  std::vector<bool> is_new_sender_;
  std::vector<bool> is_new_receiver_;
  std::vector<int32_t> copies_;
  std::vector<int32_t> waits_for_;
  std::vector<int32_t> left_;
  std::priority_queue<Arrival, std::vector<Arrival>, std::greater<>> events_;
  std::vector<uint64_t> ranked_;  ///< scratch space for one message
  std::vector<int32_t> sent_;
  std::vector<ChunkHop> out_;
};

}  // namespace

std::vector<ChunkHop> scheduleChunks(const Cut& cut, const Network& network, const ScheduleTaste& taste) {
  return Scheduler(cut, network, taste).run();
}

}  // namespace xmesh::core
