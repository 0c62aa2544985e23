#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "core/resharding/broadcast/sender_assignment.h"
#include "core/resharding/broadcast/unit_task_order.h"
#include "core/resharding/decompose.h"
#include "core/resharding/host_sets.h"
#include "core/resharding/network.h"
#include "published_cases.h"

namespace xmesh::core {
namespace {

struct Problem {
  std::vector<HostTask> tasks;
  std::vector<int64_t> rates;
  int32_t num_hosts = 0;
};

Problem problemOf(const layouts::PublishedCase& published) {
  ReshardingPlan plan;
  plan.tensors = {layouts::pairOf(published)};
  plan.topology = layouts::topologyOf(published);
  decompose(plan);
  const Network network(plan);
  const HostSets hosts(plan, network);
  Problem out;
  out.num_hosts = network.numHosts();
  out.rates.assign(static_cast<size_t>(out.num_hosts), 1);
  int64_t unit = numElements(plan.tasks.front().box);
  for (const UnitTask& task : plan.tasks) {
    unit = std::min(unit, numElements(task.box));
  }
  for (const UnitTask& task : plan.tasks) {
    out.tasks.push_back(
        {numElements(task.box) / unit, hosts.holders[static_cast<size_t>(task.holders)].front(), hosts.needers[static_cast<size_t>(task.needers)]});
  }
  return out;
}

int64_t solve(const Problem& problem, const std::string& senders, const std::string& order) {
  const HostSchedule found = orderTasks(problem.tasks, assignSenders(problem.tasks, problem.rates, senders), problem.num_hosts, {.method = order});
  EXPECT_EQ(found.makespan, makespan(problem.tasks, found.order, found.sender, problem.num_hosts));
  std::vector<int32_t> sorted = found.order;
  std::sort(sorted.begin(), sorted.end());
  std::vector<int32_t> all(problem.tasks.size());
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(sorted, all);
  for (size_t i = 0; i < problem.tasks.size(); ++i) {
    EXPECT_TRUE(std::binary_search(problem.tasks[i].senders.begin(), problem.tasks[i].senders.end(), found.sender[i]));
  }
  return found.makespan;
}

TEST(UnitTaskOrder, ReachesThePublishedMakespans) {
  for (const layouts::PublishedCase& published : layouts::publishedCases()) {
    const Problem problem = problemOf(published);
    EXPECT_EQ(static_cast<int64_t>(problem.tasks.size()), published.num_tasks) << published.name;
    EXPECT_EQ(solve(problem, "naive", "naive"), published.naive) << published.name;
    EXPECT_EQ(solve(problem, "size", "naive"), published.size) << published.name;
    EXPECT_LE(solve(problem, "size", "greedy"), published.greedy) << published.name;
    EXPECT_LE(solve(problem, "size", "dfs"), published.dfs) << published.name;
    EXPECT_LE(solve(problem, "size", "best"), std::min(published.greedy, published.dfs)) << published.name;
  }
}

/// The least makespan over all senders and orders, by trying every one.
int64_t exhaustive(const Problem& problem) {
  std::vector<int32_t> order(problem.tasks.size());
  std::iota(order.begin(), order.end(), 0);
  int64_t best = -1;
  do {
    std::vector<size_t> choice(problem.tasks.size(), 0);
    for (bool more = true; more;) {
      std::vector<int32_t> sender;
      for (size_t i = 0; i < choice.size(); ++i) {
        sender.push_back(problem.tasks[i].senders[choice[i]]);
      }
      const int64_t found = makespan(problem.tasks, order, sender, problem.num_hosts);
      best = best < 0 ? found : std::min(best, found);
      more = false;
      for (size_t i = 0; i < choice.size() && !more; ++i) {
        more = ++choice[i] < problem.tasks[i].senders.size();
        choice[i] = more ? choice[i] : 0;
      }
    }
  } while (std::next_permutation(order.begin(), order.end()));
  return best;
}

TEST(UnitTaskOrder, DepthFirstSearchFindsTheOptimumOfSmallProblems) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    std::mt19937_64 rng(seed);
    Problem problem;
    problem.num_hosts = 5;
    problem.rates.assign(5, 1);
    for (int task = 0; task < 5; ++task) {
      HostTask each;
      each.size = static_cast<int64_t>(1 + rng() % 4);
      for (int32_t host = 0; host < 5; ++host) {
        const uint64_t role = rng() % 5;
        if (role == 0) {
          each.senders.push_back(host);
        } else if (role < 3) {
          each.receivers.push_back(host);
        }
      }
      if (each.senders.empty()) {
        each.senders = {0};
      }
      if (each.receivers.empty()) {
        each.receivers = {4};
      }
      problem.tasks.push_back(each);
    }
    EXPECT_EQ(solve(problem, "size", "dfs"), exhaustive(problem)) << "seed " << seed;
  }
}

TEST(UnitTaskOrder, EqualSeedsGiveEqualSchedules) {
  const Problem problem = problemOf(layouts::publishedCases()[3]);
  const std::vector<int32_t> senders = assignSenders(problem.tasks, problem.rates, "size");
  const HostSchedule first = orderTasks(problem.tasks, senders, problem.num_hosts, {.method = "greedy", .seed = 5});
  const HostSchedule second = orderTasks(problem.tasks, senders, problem.num_hosts, {.method = "greedy", .seed = 5});
  EXPECT_EQ(first.order, second.order);
  EXPECT_EQ(first.sender, second.sender);
}

}  // namespace
}  // namespace xmesh::core
