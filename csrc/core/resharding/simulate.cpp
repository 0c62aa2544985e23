#include "core/resharding/simulate.h"

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>
#include <vector>

#include "core/resharding/dependencies.h"

namespace xmesh::core {
namespace {

/// How many offered messages a port that falls free looks at.
constexpr size_t kLookAhead = 32;

/// A port's falling free is an event only while somebody waits for it.
enum class PortEvent : uint8_t { kArrival, kSendFree, kRecvFree };

/// Events by time. Those pushed in a row for one time and of one kind stay together, so that many at once cost little.
class EventQueue {
 public:
  bool empty() const { return runs_.empty(); }
  int64_t nextTick() const { return runs_.top().tick; }

  void push(int64_t tick, PortEvent kind, int32_t id) {
    const int32_t event = newEvent(kind, id);
    Open& open = open_[static_cast<size_t>(kind)];
    if (open.last >= 0 && open.tick == tick) {
      events_[static_cast<size_t>(open.last)].next = event;
    } else {
      runs_.push({tick, event});
    }
    open = {tick, event};
  }

  /// Takes all events of the next time; visit(kind, id) may push none.
  template <typename Visit>
  void takeNext(Visit visit) {
    const int64_t tick = nextTick();
    for (Open& open : open_) {
      open.last = open.tick == tick ? -1 : open.last;
    }
    while (!runs_.empty() && runs_.top().tick == tick) {
      for (int32_t i = runs_.top().first; i >= 0;) {
        const Event event = events_[static_cast<size_t>(i)];
        visit(event.kind, event.id);
        unused_.push_back(i);
        i = event.next;
      }
      runs_.pop();
    }
  }

 private:
  struct Event {
    int32_t id = 0;
    int32_t next = -1;  ///< the next one of the same run
    PortEvent kind = PortEvent::kArrival;
  };
  struct Run {
    int64_t tick = 0;
    int32_t first = 0;
    bool operator>(const Run& other) const { return tick > other.tick; }
  };
  /// The run of a kind to which one more event may be added.
  struct Open {
    int64_t tick = 0;
    int32_t last = -1;
  };

  int32_t newEvent(PortEvent kind, int32_t id) {
    if (unused_.empty()) {
      events_.push_back({id, -1, kind});
      return static_cast<int32_t>(events_.size()) - 1;
    }
    const int32_t event = unused_.back();
    unused_.pop_back();
    events_[static_cast<size_t>(event)] = {id, -1, kind};
    return event;
  }

  std::priority_queue<Run, std::vector<Run>, std::greater<>> runs_;
  std::vector<Event> events_;
  std::vector<int32_t> unused_;
  std::array<Open, 3> open_;
};

/// The messages that a send port may take, ascending.
class Offers {
 public:
  bool empty() const { return first_ == messages_.size(); }
  size_t size() const { return messages_.size() - first_; }
  int32_t operator[](size_t i) const { return messages_[first_ + i]; }
  void insert(int32_t message) { messages_.insert(std::upper_bound(begin(), messages_.end(), message), message); }
  void erase(int32_t message) {
    if (messages_[first_] == message) {
      ++first_;
    } else {
      messages_.erase(std::lower_bound(begin(), messages_.end(), message));
    }
    if (empty()) {
      messages_.clear();
      first_ = 0;
    }
  }

 private:
  std::vector<int32_t>::iterator begin() { return messages_.begin() + static_cast<std::ptrdiff_t>(first_); }

  std::vector<int32_t> messages_;
  size_t first_ = 0;
};

class Simulation {
 public:
  Simulation(const ReshardingPlan& plan, const Network& network)
      : num_messages_(plan.messages.size()),
        costs_(num_messages_),
        next_of_pair_(num_messages_, -1),
        is_head_(num_messages_, true),
        waits_for_(num_messages_, 0),
        offered_(static_cast<size_t>(network.numPorts())),
        waiters_(static_cast<size_t>(network.numPorts())),
        send_free_(static_cast<size_t>(network.numPorts()), 0),
        recv_free_(static_cast<size_t>(network.numPorts()), 0),
        is_dirty_(static_cast<size_t>(network.numPorts()), false),
        is_awaited_(is_dirty_),
        start_(num_messages_, 0),
        end_(num_messages_, 0) {
    linkPairs(plan, network);
    linkDependents(dependenciesOf(plan, network));
  }

  int64_t run() {
    for (size_t i = 0; i < num_messages_; ++i) {
      offerIfReady(static_cast<int32_t>(i));
    }
    dispatch(0);
    while (!events_.empty()) {
      const int64_t now = events_.nextTick();
      events_.takeNext([&](PortEvent kind, int32_t id) { handle(kind, id); });
      dispatch(now);
    }
    return last_end_;
  }

  int64_t start(size_t message) const { return start_[message]; }
  int64_t end(size_t message) const { return end_[message]; }

 private:
  void linkPairs(const ReshardingPlan& plan, const Network& network) {
    const auto num_ranks = static_cast<size_t>(network.numRanks());
    std::vector<std::pair<int32_t, int32_t>> ranks;  // by message: from, to
    ranks.reserve(num_messages_);
    std::vector<size_t> next(num_ranks + 1, 0);
    for (size_t i = 0; i < num_messages_; ++i) {
      const Message& message = plan.messages[i];
      ranks.emplace_back(network.rankIndex(message.src_rank), network.rankIndex(message.dst_rank));
      costs_[i] = network.cost(ranks[i].first, ranks[i].second, plan.numBytes(message));
      ++next[static_cast<size_t>(ranks[i].first) + 1];
    }
    std::partial_sum(next.begin(), next.end(), next.begin());
    std::vector<std::pair<int32_t, int32_t>> grouped(num_messages_);  // by sending rank: message, receiving rank
    for (size_t i = 0; i < num_messages_; ++i) {
      grouped[next[static_cast<size_t>(ranks[i].first)]++] = {static_cast<int32_t>(i), ranks[i].second};
    }
    struct Last {
      size_t sender = 0;
      int32_t message = -1;
    };
    std::vector<Last> last_to(num_ranks);  // the last message to a rank
    size_t k = 0;
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      for (; k < next[rank]; ++k) {
        const auto [message, to] = grouped[k];
        Last& last = last_to[static_cast<size_t>(to)];
        if (last.message >= 0 && last.sender == rank) {
          next_of_pair_[static_cast<size_t>(last.message)] = message;
          is_head_[static_cast<size_t>(message)] = false;
        }
        last = {rank, message};
      }
    }
  }

  void linkDependents(const Dependencies& dependencies) {
    first_dependent_.assign(num_messages_ + 1, 0);
    for (int32_t before : dependencies.messages) {
      ++first_dependent_[static_cast<size_t>(before) + 1];
    }
    for (size_t i = 0; i < num_messages_; ++i) {
      waits_for_[i] = static_cast<int32_t>(dependencies.first[i + 1] - dependencies.first[i]);
      first_dependent_[i + 1] += first_dependent_[i];
    }
    dependents_.resize(dependencies.messages.size());
    std::vector<int64_t> next(first_dependent_.begin(), first_dependent_.end() - 1);
    for (size_t i = 0; i < num_messages_; ++i) {
      for (int64_t k = dependencies.first[i]; k < dependencies.first[i + 1]; ++k) {
        const int32_t before = dependencies.messages[static_cast<size_t>(k)];
        dependents_[static_cast<size_t>(next[static_cast<size_t>(before)]++)] = static_cast<int32_t>(i);
      }
    }
  }

  void offerIfReady(int32_t message) {
    if (!is_head_[static_cast<size_t>(message)] || waits_for_[static_cast<size_t>(message)] > 0) {
      return;
    }
    const int32_t port = costs_[static_cast<size_t>(message)].send_port;
    offered_[static_cast<size_t>(port)].insert(message);
    touch(port);
  }

  void touch(int32_t port) {
    if (!is_dirty_[static_cast<size_t>(port)]) {
      is_dirty_[static_cast<size_t>(port)] = true;
      dirty_.push_back(port);
    }
  }

  void handle(PortEvent kind, int32_t id) {
    if (kind == PortEvent::kSendFree) {
      is_awaited_[static_cast<size_t>(id)] = false;
      touch(id);
    } else if (kind == PortEvent::kRecvFree) {
      for (int32_t port : waiters_[static_cast<size_t>(id)]) {
        touch(port);
      }
      waiters_[static_cast<size_t>(id)].clear();
    } else {
      const auto message = static_cast<size_t>(id);
      for (int64_t k = first_dependent_[message]; k < first_dependent_[message + 1]; ++k) {
        const int32_t dependent = dependents_[static_cast<size_t>(k)];
        --waits_for_[static_cast<size_t>(dependent)];
        offerIfReady(dependent);
      }
    }
  }

  /// Lets the send port's falling free be an event.
  void await(int32_t port) {
    if (!is_awaited_[static_cast<size_t>(port)]) {
      is_awaited_[static_cast<size_t>(port)] = true;
      events_.push(send_free_[static_cast<size_t>(port)], PortEvent::kSendFree, port);
    }
  }

  /// The first offered message of a free send port whose receive port is free too, or -1.
  int32_t proposal(int32_t port, int64_t now) {
    const Offers& offered = offered_[static_cast<size_t>(port)];
    if (offered.empty()) {
      return -1;
    }
    if (send_free_[static_cast<size_t>(port)] > now) {
      await(port);
      return -1;
    }
    const size_t count = std::min(offered.size(), kLookAhead);
    for (size_t i = 0; i < count; ++i) {
      if (recv_free_[static_cast<size_t>(costs_[static_cast<size_t>(offered[i])].recv_port)] <= now) {
        return offered[i];
      }
    }
    int32_t previous = -1;
    for (size_t i = 0; i < count; ++i) {
      const int32_t recv_port = costs_[static_cast<size_t>(offered[i])].recv_port;
      if (recv_port != previous) {
        std::vector<int32_t>& waiters = waiters_[static_cast<size_t>(recv_port)];
        if (waiters.empty()) {
          events_.push(recv_free_[static_cast<size_t>(recv_port)], PortEvent::kRecvFree, recv_port);
        }
        waiters.push_back(port);
      }
      previous = recv_port;
    }
    return -1;
  }

  void dispatch(int64_t now) {
    proposals_.clear();
    for (int32_t port : dirty_) {
      is_dirty_[static_cast<size_t>(port)] = false;
      const int32_t message = proposal(port, now);
      if (message >= 0) {
        proposals_.push_back(message);
      }
    }
    dirty_.clear();
    std::sort(proposals_.begin(), proposals_.end());
    for (size_t next = 0; next < proposals_.size() || !second_proposals_.empty();) {
      const bool is_second = next == proposals_.size() || (!second_proposals_.empty() && second_proposals_.top() < proposals_[next]);
      const int32_t message = is_second ? second_proposals_.top() : proposals_[next++];
      if (is_second) {
        second_proposals_.pop();
      }
      const Network::Cost& cost = costs_[static_cast<size_t>(message)];
      if (recv_free_[static_cast<size_t>(cost.recv_port)] <= now) {
        begin(message, now);
      } else {
        const int32_t other = proposal(cost.send_port, now);
        if (other >= 0) {
          second_proposals_.push(other);
        }
      }
    }
  }

  void begin(int32_t message, int64_t now) {
    const Network::Cost& cost = costs_[static_cast<size_t>(message)];
    Offers& offered = offered_[static_cast<size_t>(cost.send_port)];
    offered.erase(message);
    start_[static_cast<size_t>(message)] = now;
    end_[static_cast<size_t>(message)] = now + std::max(cost.send_ticks, cost.recv_ticks) + cost.flight_ticks;
    send_free_[static_cast<size_t>(cost.send_port)] = now + cost.send_ticks;
    recv_free_[static_cast<size_t>(cost.recv_port)] = now + cost.recv_ticks;
    last_end_ = std::max(last_end_, end_[static_cast<size_t>(message)]);
    if (first_dependent_[static_cast<size_t>(message)] < first_dependent_[static_cast<size_t>(message) + 1]) {
      events_.push(end_[static_cast<size_t>(message)], PortEvent::kArrival, message);
    }
    const int32_t next = next_of_pair_[static_cast<size_t>(message)];
    if (next >= 0) {
      is_head_[static_cast<size_t>(next)] = true;
      offerIfReady(next);
    }
    if (!offered.empty()) {
      await(cost.send_port);
    }
  }

  size_t num_messages_;
  std::vector<Network::Cost> costs_;
  std::vector<int32_t> next_of_pair_;
  std::vector<bool> is_head_;
  std::vector<int32_t> waits_for_;
  std::vector<int64_t> first_dependent_;
  std::vector<int32_t> dependents_;
  std::vector<Offers> offered_;                ///< by send port
  std::vector<std::vector<int32_t>> waiters_;  ///< by receive port: send ports that found it taken
  std::vector<int64_t> send_free_;
  std::vector<int64_t> recv_free_;
  std::vector<bool> is_dirty_;
  std::vector<bool> is_awaited_;  ///< by send port: an event wakes it
  std::vector<int32_t> dirty_;
  std::vector<int64_t> start_;
  std::vector<int64_t> end_;
  int64_t last_end_ = 0;
  EventQueue events_;
  std::vector<int32_t> proposals_;                                                       ///< scratch space for one dispatch
  std::priority_queue<int32_t, std::vector<int32_t>, std::greater<>> second_proposals_;  ///< proposals of ports whose first choice was taken
};

}  // namespace

SimulatedPlan simulatePlan(const ReshardingPlan& plan) {
  const Network network(plan);
  Simulation simulation(plan, network);
  SimulatedPlan out;
  out.seconds = network.seconds(simulation.run());
  for (size_t i = 0; i < plan.messages.size(); ++i) {
    out.start_s.push_back(network.seconds(simulation.start(i)));
    out.end_s.push_back(network.seconds(simulation.end(i)));
  }
  return out;
}

double simulatedSeconds(const ReshardingPlan& plan, const Network& network) { return network.seconds(Simulation(plan, network).run()); }

}  // namespace xmesh::core
