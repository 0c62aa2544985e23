#include "core/resharding/simulate.h"

#include <algorithm>
#include <queue>

#include "core/resharding/dependencies.h"

namespace xmesh::core {
namespace {

/// How many offered messages a port that falls free looks at.
constexpr size_t kLookAhead = 32;

/// A port's falling free is an event only while somebody waits for it.
enum class PortEvent : uint8_t { kArrival, kSendFree, kRecvFree };

class Event {
 public:
  Event(int64_t tick, PortEvent kind, int32_t id) : tick_(tick), what_(static_cast<int64_t>(kind) << 32 | id) {}
  int64_t tick() const { return tick_; }
  PortEvent kind() const { return static_cast<PortEvent>(what_ >> 32); }
  /// Message or port.
  int32_t id() const { return static_cast<int32_t>(what_ & 0xFFFFFFFF); }
  bool operator>(const Event& other) const { return tick_ > other.tick_ || (tick_ == other.tick_ && what_ > other.what_); }

 private:
  int64_t tick_;
  int64_t what_;
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
    int64_t last = 0;
    dispatch(0);
    while (!events_.empty()) {
      const int64_t now = events_.top().tick();
      while (!events_.empty() && events_.top().tick() == now) {
        const Event event = events_.top();
        events_.pop();
        handle(event);
      }
      last = now;
      dispatch(now);
    }
    return last;
  }

  int64_t start(size_t message) const { return start_[message]; }
  int64_t end(size_t message) const { return end_[message]; }

 private:
  void linkPairs(const ReshardingPlan& plan, const Network& network) {
    const auto num_ranks = static_cast<size_t>(network.numRanks());
    std::vector<size_t> first(num_ranks + 1, 0);  // messages grouped by sending rank
    for (size_t i = 0; i < num_messages_; ++i) {
      const Message& message = plan.messages[i];
      const int32_t src = network.rankIndex(message.src_rank);
      costs_[i] = network.cost(src, network.rankIndex(message.dst_rank), plan.numBytes(message));
      ++first[static_cast<size_t>(src) + 1];
    }
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      first[rank + 1] += first[rank];
    }
    std::vector<int32_t> grouped(num_messages_);
    std::vector<size_t> next(first.begin(), first.end() - 1);
    for (size_t i = 0; i < num_messages_; ++i) {
      grouped[next[static_cast<size_t>(network.rankIndex(plan.messages[i].src_rank))]++] = static_cast<int32_t>(i);
    }
    std::vector<int32_t> last_to(num_ranks, -1);  // the group's last message to a rank
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      for (size_t k = first[rank]; k < first[rank + 1]; ++k) {
        const int32_t message = grouped[k];
        int32_t& last = last_to[static_cast<size_t>(network.rankIndex(plan.messages[static_cast<size_t>(message)].dst_rank))];
        if (last >= 0) {
          next_of_pair_[static_cast<size_t>(last)] = message;
          is_head_[static_cast<size_t>(message)] = false;
        }
        last = message;
      }
      for (size_t k = first[rank]; k < first[rank + 1]; ++k) {
        last_to[static_cast<size_t>(network.rankIndex(plan.messages[static_cast<size_t>(grouped[k])].dst_rank))] = -1;
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
    std::vector<int32_t>& offered = offered_[static_cast<size_t>(port)];
    offered.insert(std::upper_bound(offered.begin(), offered.end(), message), message);
    touch(port);
  }

  void touch(int32_t port) {
    if (!is_dirty_[static_cast<size_t>(port)]) {
      is_dirty_[static_cast<size_t>(port)] = true;
      dirty_.push_back(port);
    }
  }

  void handle(const Event& event) {
    if (event.kind() == PortEvent::kSendFree) {
      is_awaited_[static_cast<size_t>(event.id())] = false;
      touch(event.id());
    } else if (event.kind() == PortEvent::kRecvFree) {
      for (int32_t port : waiters_[static_cast<size_t>(event.id())]) {
        touch(port);
      }
      waiters_[static_cast<size_t>(event.id())].clear();
    } else {
      const auto message = static_cast<size_t>(event.id());
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
      events_.push({send_free_[static_cast<size_t>(port)], PortEvent::kSendFree, port});
    }
  }

  /// The first offered message of a free send port whose receive port is free too, or -1.
  int32_t proposal(int32_t port, int64_t now) {
    const std::vector<int32_t>& offered = offered_[static_cast<size_t>(port)];
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
          events_.push({recv_free_[static_cast<size_t>(recv_port)], PortEvent::kRecvFree, recv_port});
        }
        waiters.push_back(port);
      }
      previous = recv_port;
    }
    return -1;
  }

  void dispatch(int64_t now) {
    std::priority_queue<int32_t, std::vector<int32_t>, std::greater<>> proposals;
    for (int32_t port : dirty_) {
      is_dirty_[static_cast<size_t>(port)] = false;
      const int32_t message = proposal(port, now);
      if (message >= 0) {
        proposals.push(message);
      }
    }
    dirty_.clear();
    while (!proposals.empty()) {
      const int32_t message = proposals.top();
      proposals.pop();
      const Network::Cost& cost = costs_[static_cast<size_t>(message)];
      if (recv_free_[static_cast<size_t>(cost.recv_port)] <= now) {
        begin(message, now);
      } else {
        const int32_t other = proposal(cost.send_port, now);
        if (other >= 0) {
          proposals.push(other);
        }
      }
    }
  }

  void begin(int32_t message, int64_t now) {
    const Network::Cost& cost = costs_[static_cast<size_t>(message)];
    std::vector<int32_t>& offered = offered_[static_cast<size_t>(cost.send_port)];
    offered.erase(std::lower_bound(offered.begin(), offered.end(), message));
    start_[static_cast<size_t>(message)] = now;
    end_[static_cast<size_t>(message)] = now + std::max(cost.send_ticks, cost.recv_ticks) + cost.flight_ticks;
    send_free_[static_cast<size_t>(cost.send_port)] = now + cost.send_ticks;
    recv_free_[static_cast<size_t>(cost.recv_port)] = now + cost.recv_ticks;
    events_.emplace(end_[static_cast<size_t>(message)], PortEvent::kArrival, message);
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
  std::vector<std::vector<int32_t>> offered_;  ///< by send port, ascending
  std::vector<std::vector<int32_t>> waiters_;  ///< by receive port: send ports that found it taken
  std::vector<int64_t> send_free_;
  std::vector<int64_t> recv_free_;
  std::vector<bool> is_dirty_;
  std::vector<bool> is_awaited_;  ///< by send port: an event wakes it
  std::vector<int32_t> dirty_;
  std::vector<int64_t> start_;
  std::vector<int64_t> end_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
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
