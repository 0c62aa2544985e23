#include "core/resharding/broadcast/unit_task_order.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

namespace xmesh::core {
namespace {

/// Tasks alike in size, senders and receivers are interchangeable: the searches order classes, not tasks.
struct TaskClass {
  const HostTask* task = nullptr;
  std::vector<int32_t> members;
};

std::vector<TaskClass> classesOf(const std::vector<HostTask>& tasks) {
  std::map<std::tuple<int64_t, std::vector<int32_t>, std::vector<int32_t>>, size_t> index_of;
  std::vector<TaskClass> out;
  for (size_t i = 0; i < tasks.size(); ++i) {
    const auto [entry, is_new] = index_of.try_emplace({tasks[i].size, tasks[i].senders, tasks[i].receivers}, out.size());
    if (is_new) {
      out.push_back({&tasks[i], {}});
    }
    out[entry->second].members.push_back(static_cast<int32_t>(i));
  }
  return out;
}

/// NicPorts' times while tasks are placed one after another.
struct NicPorts {
  explicit NicPorts(int32_t num_hosts) : send_free(static_cast<size_t>(num_hosts)), recv_free(static_cast<size_t>(num_hosts)) {}
  int64_t earliest(const HostTask& task, int32_t sender) const {
    int64_t start = send_free[static_cast<size_t>(sender)];
    for (int32_t host : task.receivers) {
      start = std::max(start, recv_free[static_cast<size_t>(host)]);
    }
    return start;
  }
  void occupy(const HostTask& task, int32_t sender, int64_t until) {
    send_free[static_cast<size_t>(sender)] = until;
    for (int32_t host : task.receivers) {
      recv_free[static_cast<size_t>(host)] = until;
    }
  }
  std::vector<int64_t> send_free;
  std::vector<int64_t> recv_free;
};

/// Load still to come by host: all of a receiver's, and what only that host can send.
struct Remaining {
  Remaining(const std::vector<TaskClass>& classes, int32_t num_hosts)
      : incoming(static_cast<size_t>(num_hosts)), outgoing(static_cast<size_t>(num_hosts)) {
    for (const TaskClass& each : classes) {
      change(*each.task, static_cast<int64_t>(each.members.size()));
    }
  }
  void change(const HostTask& task, int64_t count) {
    for (int32_t host : task.receivers) {
      incoming[static_cast<size_t>(host)] += count * task.size;
    }
    if (task.senders.size() == 1) {
      outgoing[static_cast<size_t>(task.senders[0])] += count * task.size;
    }
  }
  /// No completion is earlier: the lower bound that prunes (Eq. 4 with the receivers added).
  int64_t bound(const NicPorts& ports) const {
    int64_t out = 0;
    for (size_t host = 0; host < incoming.size(); ++host) {
      out = std::max({out, ports.recv_free[host] + incoming[host], ports.send_free[host] + outgoing[host]});
    }
    return out;
  }
  std::vector<int64_t> incoming;
  std::vector<int64_t> outgoing;
};

/// Depth-first search with pruning. A node's children are tried by start time; the budget counts evaluated children.
class DepthFirstSearch {
 public:
  DepthFirstSearch(const std::vector<TaskClass>& classes, int32_t num_hosts, int64_t budget, HostSchedule& best)
      : classes_(classes), ports_(num_hosts), remaining_(classes, num_hosts), taken_(classes.size(), 0), budget_(budget), best_(best) {
    num_tasks_ = best.order.size();
    sender_ = best.sender;
    floor_ = remaining_.bound(ports_);
  }
  void run() { descend(0); }

 private:
  struct Child {
    int64_t start = 0;
    int32_t task_class = 0;
    int32_t sender = 0;
    bool operator<(const Child& other) const { return std::tie(start, task_class, sender) < std::tie(other.start, other.task_class, other.sender); }
  };

  std::vector<Child> children() {
    std::vector<Child> out;
    for (size_t i = 0; i < classes_.size(); ++i) {
      if (taken_[i] == classes_[i].members.size()) {
        continue;
      }
      for (int32_t sender : classes_[i].task->senders) {
        out.push_back({ports_.earliest(*classes_[i].task, sender), static_cast<int32_t>(i), sender});
      }
    }
    budget_ -= static_cast<int64_t>(out.size());
    std::sort(out.begin(), out.end());
    return out;
  }

  void descend(int64_t end) {
    if (order_.size() == num_tasks_) {
      best_ = {order_, sender_, end};
      return;
    }
    for (const Child& child : children()) {
      if (budget_ < 0 || best_.makespan == floor_) {
        return;
      }
      const TaskClass& task_class = classes_[static_cast<size_t>(child.task_class)];
      const HostTask& task = *task_class.task;
      const int32_t member = task_class.members[taken_[static_cast<size_t>(child.task_class)]];
      const int64_t until = child.start + task.size;
      const NicPorts saved = ports_;
      ports_.occupy(task, child.sender, until);
      remaining_.change(task, -1);
      if (std::max(end, remaining_.bound(ports_)) < best_.makespan && until < best_.makespan) {
        ++taken_[static_cast<size_t>(child.task_class)];
        order_.push_back(member);
        sender_[static_cast<size_t>(member)] = child.sender;
        descend(std::max(end, until));
        order_.pop_back();
        --taken_[static_cast<size_t>(child.task_class)];
      }
      remaining_.change(task, 1);
      ports_ = saved;
    }
  }

  const std::vector<TaskClass>& classes_;
  NicPorts ports_;
  Remaining remaining_;
  std::vector<size_t> taken_;
  int64_t budget_;
  HostSchedule& best_;
  size_t num_tasks_ = 0;
  int64_t floor_ = 0;
  std::vector<int32_t> order_;
  std::vector<int32_t> sender_;
};

/// SplitMix64: the same numbers on every machine.
class Random {
 public:
  explicit Random(int64_t seed) : state_(static_cast<uint64_t>(seed)) {}
  uint64_t below(uint64_t limit) {
    state_ += 0x9E3779B97F4A7C15ULL;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return (z ^ (z >> 31)) % limit;
  }

 private:
  uint64_t state_;
};

/// The paper's randomized greedy search: whenever ports fall free, several random sets of tasks that do not overlap are drawn and the one with
/// the most hosts starts.
class GreedySearch {
 public:
  GreedySearch(const std::vector<TaskClass>& classes, int32_t num_hosts, const OrderSearch& search, HostSchedule& best)
      : classes_(classes), num_hosts_(num_hosts), random_(search.seed), budget_(search.node_budget), best_(best) {}

  void run() {
    constexpr int kRounds = 16;
    const int64_t floor = Remaining(classes_, num_hosts_).bound(NicPorts(num_hosts_));
    for (int round = 0; round < kRounds && budget_ > 0 && best_.makespan > floor; ++round) {
      HostSchedule found = schedule();
      if (budget_ >= 0 && found.makespan < best_.makespan) {
        best_ = std::move(found);
      }
    }
  }

 private:
  struct Start {
    size_t task_class = 0;
    int32_t sender = 0;
  };

  HostSchedule schedule() {
    HostSchedule out;
    out.sender = best_.sender;
    NicPorts ports(num_hosts_);
    std::vector<size_t> taken(classes_.size(), 0);
    pressure_.assign(static_cast<size_t>(num_hosts_), 0);
    std::vector<size_t> open(classes_.size());
    std::iota(open.begin(), open.end(), size_t{0});
    for (const TaskClass& each : classes_) {
      press(*each.task, static_cast<double>(each.members.size()));
    }
    int64_t now = 0;
    while (!open.empty() && budget_ >= 0) {
      for (const Start& start : largestSet(open, ports, now)) {
        const TaskClass& task_class = classes_[start.task_class];
        const int32_t member = task_class.members[taken[start.task_class]++];
        ports.occupy(*task_class.task, start.sender, now + task_class.task->size);
        press(*task_class.task, -1);
        out.order.push_back(member);
        out.sender[static_cast<size_t>(member)] = start.sender;
        out.makespan = std::max(out.makespan, now + task_class.task->size);
      }
      std::erase_if(open, [&](size_t i) { return taken[i] == classes_[i].members.size(); });
      now = nextFree(ports, now);
    }
    return out;
  }

  void press(const HostTask& task, double count) {
    for (int32_t host : task.senders) {
      pressure_[static_cast<size_t>(host)] += count * static_cast<double>(task.size) / static_cast<double>(task.senders.size());
    }
  }

  static int64_t nextFree(const NicPorts& ports, int64_t now) {
    int64_t next = 0;
    for (const std::vector<int64_t>* times : {&ports.send_free, &ports.recv_free}) {
      for (int64_t time : *times) {
        next = time > now && (next == 0 || time < next) ? time : next;
      }
    }
    return next;
  }

  std::vector<Start> largestSet(const std::vector<size_t>& open, const NicPorts& ports, int64_t now) {
    constexpr int kDraws = 4;
    std::vector<Start> best;
    size_t best_hosts = 0;
    std::vector<size_t> shuffled = open;
    for (int draw = 0; draw < kDraws; ++draw) {
      for (size_t i = shuffled.size(); i > 1; --i) {
        std::swap(shuffled[i - 1], shuffled[random_.below(i)]);
      }
      NicPorts trial = ports;
      std::vector<Start> set;
      size_t num_hosts = 0;
      for (size_t i : shuffled) {
        const HostTask& task = *classes_[i].task;
        const int32_t sender = freeSender(task, trial, now);
        if (sender >= 0) {
          trial.occupy(task, sender, now + task.size);
          set.push_back({i, sender});
          num_hosts += 1 + task.receivers.size();
        }
      }
      budget_ -= static_cast<int64_t>(shuffled.size());
      if (num_hosts > best_hosts) {
        best_hosts = num_hosts;
        best = std::move(set);
      }
    }
    return best;
  }

  /// A sender that can start now, the one that the remaining tasks ask least of; -1 if there is none.
  int32_t freeSender(const HostTask& task, const NicPorts& ports, int64_t now) const {
    int32_t best = -1;
    for (int32_t host : task.senders) {
      if (ports.earliest(task, host) <= now && (best < 0 || pressure_[static_cast<size_t>(host)] < pressure_[static_cast<size_t>(best)])) {
        best = host;
      }
    }
    return best;
  }

  const std::vector<TaskClass>& classes_;
  int32_t num_hosts_;
  Random random_;
  int64_t budget_;
  HostSchedule& best_;
  std::vector<double> pressure_;
};

}  // namespace

int64_t makespan(const std::vector<HostTask>& tasks, const std::vector<int32_t>& order, const std::vector<int32_t>& sender, int32_t num_hosts) {
  NicPorts ports(num_hosts);
  int64_t end = 0;
  for (int32_t index : order) {
    const HostTask& task = tasks[static_cast<size_t>(index)];
    const int64_t until = ports.earliest(task, sender[static_cast<size_t>(index)]) + task.size;
    ports.occupy(task, sender[static_cast<size_t>(index)], until);
    end = std::max(end, until);
  }
  return end;
}

HostSchedule orderTasks(const std::vector<HostTask>& tasks, const std::vector<int32_t>& initial_sender, int32_t num_hosts,
                        const OrderSearch& search) {
  constexpr size_t kMaxDepth = 4096;
  HostSchedule best;
  best.order.resize(tasks.size());
  std::iota(best.order.begin(), best.order.end(), 0);
  best.sender = initial_sender;
  best.makespan = makespan(tasks, best.order, best.sender, num_hosts);
  if (search.method == "naive" || tasks.size() < 2) {
    return best;
  }
  const std::vector<TaskClass> classes = classesOf(tasks);
  if (search.method != "dfs") {
    GreedySearch(classes, num_hosts, search, best).run();
  }
  if (search.method != "greedy" && tasks.size() <= kMaxDepth) {
    DepthFirstSearch(classes, num_hosts, search.node_budget, best).run();
  }
  return best;
}

}  // namespace xmesh::core
