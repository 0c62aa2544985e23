// A link's processes on the fake network: who is told what, whoever dies, stops, comes back or comes late.
#include <gtest/gtest.h>

#include "runtime/link/link_world.h"

namespace xmesh::runtime::link::test {
namespace {

using Processes = std::vector<Process*>;

void meet(LinkWorld& world, const Processes& replica, const Processes& source) {
  Process* leader = replica.front();
  const int32_t number = source.front()->options.self.number;
  leader->network().post([leader, number] {
    leader->network().setAddress(number, "fake:" + std::to_string(number));
    leader->node().meet(number);
  });
  world.network().runUntilIdle();
}

void publish(const Processes& source, uint64_t version) {
  for (Process* process : source) {
    process->network().post([process, version] { process->node().publish(version); });
  }
}

void swap(const Processes& replica) {
  for (Process* process : replica) {
    process->network().post([process] { process->num_swaps = process->node().swap(); });
  }
}

void expectHolders(Process& process, uint64_t version, const std::vector<uint64_t>& holders) {
  EXPECT_EQ(process.settled[version].error, "");
  EXPECT_EQ(process.settled[version].holders, holders);
}

uint64_t numberOf(const Processes& party) { return party.front()->options.party; }

TEST(Link, BringsVersionsToAllReplicas) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    LinkWorld world(16, seed);
    const Processes source = world.start(true, "", 3);
    const Processes a = world.start(false, "a", 2);
    const Processes b = world.start(false, "b", 1);
    world.network().runUntilIdle();
    ASSERT_TRUE(a[1]->party.has_value());
    ASSERT_EQ(a[1]->party->members.size(), 2U);
    meet(world, a, source);
    meet(world, b, source);
    for (const uint64_t version : {3, 7}) {
      publish(source, version);
      world.network().runUntilIdle();
      for (Process* process : source) {
        expectHolders(*process, version, {numberOf(a), numberOf(b)});
      }
      swap(a);
      world.network().runUntilIdle();
      ASSERT_EQ(a[0]->held.back(), version);
      ASSERT_EQ(a[1]->held.back(), version);
      ASSERT_EQ(b[0]->held.back(), version);
      ASSERT_EQ(a[1]->swapped.rbegin()->second, version);
    }
  }
}

TEST(Link, AVersionWithoutReplicasIsSettledAtOnce) {
  LinkWorld world(4, 1);
  const Processes source = world.start(true, "", 2);
  world.network().runUntilIdle();
  publish(source, 1);
  world.network().runUntilIdle();
  expectHolders(*source[1], 1, {});
}

TEST(Link, VersionsAscend) {
  LinkWorld world(8, 1);
  const Processes source = world.start(true, "", 2);
  const Processes a = world.start(false, "a", 1);
  world.network().runUntilIdle();
  meet(world, a, source);
  publish(source, 5);
  world.network().runUntilIdle();
  publish(source, 5);
  world.network().runUntilIdle();
  EXPECT_EQ(source[1]->settled[5].error, "versions ascend: version 5 is not above version 5");
  source[0]->network().post([&] { source[0]->node().publish(6); });
  source[1]->network().post([&] { source[1]->node().publish(7); });
  world.network().runUntilIdle();
  for (const auto& [rank, version] : {std::pair(0, 6), std::pair(1, 7)}) {
    const std::string error = source[static_cast<size_t>(rank)]->settled[static_cast<uint64_t>(version)].error;
    EXPECT_NE(error.find("the source's ranks publish different versions: 6 and 7"), std::string::npos) << error;
  }
  // A new source goes on above what a replica has had.
  for (Process* process : source) {
    world.kill(*process);
  }
  world.settle();
  EXPECT_EQ(a[0]->num_source_losses, 1);
  const Processes next = world.start(true, "", 1);
  world.network().runUntilIdle();
  meet(world, a, next);
  publish(next, 4);
  world.network().runUntilIdle();
  EXPECT_EQ(next[0]->settled[4].error, "versions ascend: version 4 is not above version 5");
  publish(next, 6);
  world.network().runUntilIdle();
  expectHolders(*next[0], 6, {numberOf(a)});
}

TEST(Link, AReplicaThatIsStoppedIsLeftOutAndJoinsAgain) {
  for (const int stopped : {0, 1}) {
    LinkWorld world(8, 3);
    const Processes source = world.start(true, "", 2);
    const Processes a = world.start(false, "a", 2);
    const Processes b = world.start(false, "b", 2);
    world.network().runUntilIdle();
    meet(world, a, source);
    meet(world, b, source);
    world.stop(*a[static_cast<size_t>(stopped)]);
    publish(source, 1);
    world.settle();
    expectHolders(*source[1], 1, {numberOf(b)});
    world.resume(*a[static_cast<size_t>(stopped)]);
    world.settle();
    EXPECT_FALSE(a[0]->left_out.empty());
    EXPECT_NE(a[1]->left_out.at(0).find("it was not ready for version 1 within 1000 ms"), std::string::npos);
    EXPECT_TRUE(a[0]->held.empty());
    publish(source, 2);
    world.settle();
    expectHolders(*source[1], 2, {numberOf(a), numberOf(b)});
  }
}

TEST(Link, WhoRefusesOrPlansOtherwiseIsLeftOut) {
  LinkWorld world(8, 5);
  const Processes source = world.start(true, "", 1);
  const Processes a = world.start(false, "a", 2);
  const Processes b = world.start(false, "b", 2);
  const Processes c = world.start(false, "c", 1);
  world.network().runUntilIdle();
  for (const Processes& replica : {a, b, c}) {
    meet(world, replica, source);
  }
  a[1]->refuses = "no memory";
  b[0]->other_plan = "?";
  publish(source, 1);
  world.settle();
  expectHolders(*source[0], 1, {numberOf(c)});
  EXPECT_EQ(source[0]->settled[1].left_out.at(0), "replica 'a': no memory");
  EXPECT_EQ(a[0]->left_out.at(0), "no memory");
  EXPECT_NE(b[1]->left_out.at(0).find("another plan"), std::string::npos);
  source[0]->refuses = "the optimizer has changed it";
  publish(source, 2);
  world.settle();
  EXPECT_EQ(source[0]->settled[2].error, "the optimizer has changed it");
}

TEST(Link, AReplicaThatIsStartedAgainTakesItsPlace) {
  LinkWorld world(8, 6);
  const Processes source = world.start(true, "", 1);
  const Processes old = world.start(false, "a", 2);
  world.network().runUntilIdle();
  meet(world, old, source);
  const Processes young = world.start(false, "a", 1);
  world.network().runUntilIdle();
  meet(world, young, source);
  EXPECT_NE(old[1]->broken.find("replica 'a' has been started again"), std::string::npos);
  publish(source, 1);
  world.settle();
  expectHolders(*source[0], 1, {numberOf(young)});
}

TEST(Link, AReplicaMayComeBeforeTheSourceIsThere) {
  LinkWorld world(8, 7);
  const Processes a = world.start(false, "a", 1);
  world.network().runUntilIdle();
  const Processes source = world.start(true, "", 2);
  meet(world, a, source);
  publish(source, 1);
  world.network().runUntilIdle();
  expectHolders(*source[0], 1, {numberOf(a)});
}

/// Random deaths, stops, returns, late replicas and sources that follow each other.
class RandomLink {
 public:
  explicit RandomLink(uint64_t seed) : world_(64, seed) {
    source_ = world_.start(true, "", size());
    for (const char* name : {"a", "b", "c"}) {
      replicas_[name] = world_.start(false, name, size());
    }
    world_.network().runUntilIdle();
    for (const auto& [name, replica] : replicas_) {
      meet(world_, replica, source_);
    }
  }

  void run() {
    for (int round = 0; round < 6; ++round) {
      const std::set<std::string> well = wellReplicas();
      const uint64_t version = ++version_;
      publish(source_, version);
      disturb();
      for (const auto& [name, replica] : replicas_) {
        if (draw(2) == 0) {
          swap(replica);
        }
      }
      for (int64_t steps = draw(30); steps > 0; --steps) {
        world_.network().step();
      }
      disturb();
      world_.settle();
      check(version, well);
      restore();
    }
  }

 private:
  int64_t draw(int64_t count) { return static_cast<int64_t>(world_.rng() % static_cast<uint64_t>(count)); }
  int32_t size() { return static_cast<int32_t>(1 + draw(3)); }
  static bool isWell(const Processes& party) {
    return std::all_of(party.begin(), party.end(), [](const Process* one) { return !one->is_dead && !one->is_stopped && one->broken.empty(); });
  }
  std::set<std::string> wellReplicas() const {
    std::set<std::string> out;
    for (const auto& [name, replica] : replicas_) {
      if (isWell(replica)) {
        out.insert(name);
      }
    }
    return out;
  }

  /// Something happens to somebody, at some step.
  void disturb() {
    for (int64_t steps = draw(60); steps > 0; --steps) {
      world_.network().step();
    }
    Processes candidates;
    for (const auto& [name, replica] : replicas_) {
      candidates.insert(candidates.end(), replica.begin(), replica.end());
    }
    if (draw(4) == 0) {
      candidates.insert(candidates.end(), source_.begin(), source_.end());
    }
    Process& victim = *candidates[static_cast<size_t>(draw(static_cast<int64_t>(candidates.size())))];
    if (draw(2) == 0 || victim.is_dead || victim.is_stopped) {
      return;
    }
    if (draw(2) == 0) {
      world_.kill(victim);
    } else {
      world_.stop(victim);
    }
  }

  void check(uint64_t version, const std::set<std::string>& well) {
    for (const auto& [name, replica] : replicas_) {
      std::set<uint64_t> verdicts;
      for (const Process* process : replica) {
        for (const uint64_t held : process->held) {
          verdicts.insert(held);
        }
        for (const auto& [count, swapped] : process->swapped) {
          ASSERT_TRUE(swapped == 0 || process->received.contains(swapped));
          for (const Process* other : replica) {  // a replica is never of two versions
            const auto same = other->swapped.find(count);
            ASSERT_TRUE(same == other->swapped.end() || same->second == swapped);
          }
        }
      }
      for (const uint64_t held : verdicts) {
        for (const Process* process : replica) {
          ASSERT_TRUE(process->received.contains(held)) << "replica " << name << " holds version " << held << ", a rank has not got it";
        }
      }
      if (isWell(replica)) {
        for (const Process* process : replica) {
          ASSERT_EQ(process->held, replica.front()->held);
        }
      }
    }
    if (!isWell(source_)) {
      return;
    }
    const Settlement& settled = source_.front()->settled.at(version);
    ASSERT_EQ(settled.error, "");
    for (const Process* process : source_) {
      ASSERT_EQ(process->settled.at(version), settled);
    }
    for (const std::string& name : well) {
      const Processes& replica = replicas_.at(name);
      if (isWell(replica)) {
        ASSERT_TRUE(std::find(settled.holders.begin(), settled.holders.end(), numberOf(replica)) != settled.holders.end()) << name;
        ASSERT_EQ(replica.front()->held.back(), version);
      }
    }
  }

  /// Those who stood still go on; a source or a replica that has lost a rank is started anew.
  void restore() {
    for (const auto& process : world_.processes) {
      if (process->is_stopped) {
        world_.resume(*process);
      }
    }
    world_.settle();
    const bool is_new = !isWell(source_);
    if (is_new) {
      for (Process* process : source_) {
        if (!process->is_dead) {
          world_.kill(*process);
        }
      }
      world_.settle();
      source_ = world_.start(true, "", size());
      world_.network().runUntilIdle();
    }
    for (auto& [name, replica] : replicas_) {
      const bool is_young = !isWell(replica);
      if (is_young) {
        for (Process* process : replica) {
          if (!process->is_dead) {
            ASSERT_NE(process->broken, "") << "a rank that lives has not heard that its replica is over";
            world_.kill(*process);
          }
        }
        world_.settle();
        replica = world_.start(false, name, size());
        world_.network().runUntilIdle();
      }
      if (is_young || is_new) {
        meet(world_, replica, source_);
      }
    }
  }

  LinkWorld world_;
  Processes source_;
  std::map<std::string, Processes> replicas_;
  uint64_t version_ = 0;
};

TEST(Link, HoldsUpWhateverHappens) {
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomLink link(seed);
    link.run();
    if (::testing::Test::HasFailure()) {
      return;
    }
  }
}

TEST(Link, MessagesComeBack) {
  Message message;
  message.kind = Kind::kKnow;
  message.attempt = {3, 7, 2};
  message.count = 3;
  message.rank = 1;
  message.size = 4;
  message.has_all = true;
  message.text = "why";
  message.numbers = {1, 2};
  message.texts = {"x", ""};
  message.party = {9, true, "a", {{5, "127.0.0.1:1", "host", "manifest"}}};
  const std::string bytes = encode(message);
  EXPECT_EQ(decode(bytes), message);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THROW(decode(bytes.substr(0, size)), std::runtime_error);
  }
  EXPECT_FALSE(isLinkMessage("\x01"));
}

}  // namespace
}  // namespace xmesh::runtime::link::test
