// The order of calls on a device, with ranks in several groups: messages between them come late, in any order.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "runtime/stream/call_order.h"

namespace xmesh::runtime {
namespace {

struct TestCall {
  CallOrder::Name name;
  std::vector<size_t> ranks;
  bool fails = false;
  // How far it is.
  std::map<size_t, uint64_t> proposed = {};  ///< by rank, the turn
  bool has_failed = false;
};

class Ranks {
 public:
  /// With `apart` each group of a rank has an order of its own.
  Ranks(uint64_t seed, bool apart) : random_(seed) {
    const size_t num_groups = 1 + draw(4);
    const size_t num_ranks = 2 + draw(5);
    std::vector<std::vector<size_t>> groups;
    for (size_t group = 0; group < num_groups; ++group) {
      groups.push_back(some(all(num_ranks)));
    }
    for (size_t i = 0; i < 12; ++i) {
      const size_t group = draw(num_groups);
      calls_.push_back({{group, i}, some(groups[group]), draw(8) == 0});
    }
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      std::vector<std::shared_ptr<CallOrder>> own(num_groups);
      std::generate(own.begin(), own.end(), [] { return std::make_shared<CallOrder>(); });
      if (!apart) {
        std::fill(own.begin(), own.end(), own.front());
      }
      orders_.push_back(std::move(own));
      // A few calls at a time, in an order of its own, then it waits until they are launched.
      std::vector<size_t> script;
      for (size_t i = 0; i < calls_.size(); ++i) {
        if (std::count(calls_[i].ranks.begin(), calls_[i].ranks.end(), rank) > 0) {
          script.push_back(i);
        }
      }
      scripts_.emplace_back();
      for (const size_t call : script) {
        if (scripts_.back().empty() || scripts_.back().back().front() / 4 != call / 4) {
          scripts_.back().emplace_back();
        }
        scripts_.back().back().push_back(call);
      }
      for (std::vector<size_t>& together : scripts_.back()) {
        std::shuffle(together.begin(), together.end(), random_);
      }
    }
    places_.resize(num_ranks);
    launched_.resize(num_ranks);
    left_.resize(num_ranks);
  }

  /// Whether every call that did not fail was launched on all of its ranks.
  bool run() {
    while (step()) {
    }
    return std::all_of(scripts_.begin(), scripts_.end(), [](const auto& script) { return script.empty(); });
  }

  /// Whether no rank's order contradicts those of the others, not even round several of them.
  bool isOneOrder() const {
    std::map<size_t, std::set<size_t>> later;
    std::map<size_t, size_t> num_earlier;
    for (const std::vector<size_t>& own : launched_) {
      for (size_t i = 1; i < own.size(); ++i) {
        num_earlier[own[i]] += later[own[i - 1]].insert(own[i]).second ? 1 : 0;
      }
    }
    std::deque<size_t> next;
    size_t num_found = 0;
    for (size_t i = 0; i < calls_.size(); ++i) {
      if (num_earlier[i] == 0) {
        next.push_back(i);
      }
    }
    for (; !next.empty(); next.pop_front(), ++num_found) {
      for (const size_t call : later[next.front()]) {
        if (--num_earlier[call] == 0) {
          next.push_back(call);
        }
      }
    }
    return num_found == calls_.size();
  }

 private:
  size_t draw(size_t count) { return random_() % count; }
  static std::vector<size_t> all(size_t count) {
    std::vector<size_t> out(count);
    std::iota(out.begin(), out.end(), size_t{0});
    return out;
  }
  std::vector<size_t> some(std::vector<size_t> of) {
    std::shuffle(of.begin(), of.end(), random_);
    of.resize(2 + (of.size() > 2 ? draw(of.size() - 1) : 0));
    return of;
  }
  CallOrder& orderOf(size_t rank, size_t call) { return *orders_[rank][calls_[call].name.group]; }

  /// A rank goes on, or a message arrives.
  bool step() {
    std::vector<size_t> able;
    for (size_t rank = 0; rank < scripts_.size(); ++rank) {
      if (mayGoOn(rank)) {
        able.push_back(rank);
      }
    }
    const size_t chosen = able.size() + messages_.size() == 0 ? 0 : draw(able.size() + messages_.size());
    if (chosen < able.size()) {
      goOn(able[chosen]);
      return true;
    }
    if (messages_.empty()) {
      return false;
    }
    const auto message = messages_.begin() + static_cast<std::ptrdiff_t>(chosen - able.size());
    const std::function<void()> arrive = std::move(*message);
    messages_.erase(message);
    arrive();
    return true;
  }

  bool hasEnded(size_t rank, size_t call) const {
    return std::count(launched_[rank].begin(), launched_[rank].end(), call) > 0 || left_[rank].count(call) > 0;
  }
  bool isMade(size_t rank, size_t call) const { return places_[rank].count(call) > 0; }
  bool mayGoOn(size_t rank) const {
    const auto& script = scripts_[rank];
    return !script.empty() && std::any_of(script.front().begin(), script.front().end(), [&](size_t call) { return !isMade(rank, call); });
  }

  void goOn(size_t rank) {
    const std::vector<size_t>& together = scripts_[rank].front();
    const size_t call = *std::find_if(together.begin(), together.end(), [&](size_t one) { return !isMade(rank, one); });
    make(rank, call);
  }

  void endTogether(size_t rank) {
    auto& script = scripts_[rank];
    while (!script.empty() && std::all_of(script.front().begin(), script.front().end(), [&](size_t call) { return hasEnded(rank, call); })) {
      script.erase(script.begin());
    }
  }

  void make(size_t rank, size_t call) {
    TestCall& made = calls_[call];
    const auto launch = [this, rank, call] {
      launched_[rank].push_back(call);
      messages_.emplace_back([this, rank] { endTogether(rank); });
    };
    const auto held = [this, rank, call](uint64_t turn) {
      for (const size_t peer : calls_[call].ranks) {
        messages_.emplace_back([this, rank, call, peer, turn] { ask(rank, call, peer, turn); });
      }
    };
    const CallOrder::Place place = orderOf(rank, call).propose(made.name, {launch, held});
    places_[rank][call] = place.id;
    made.proposed[rank] = place.turn;
    if (made.has_failed) {
      return leave(rank, call);
    }
    if (made.fails && draw(made.ranks.size()) == 0) {
      made.has_failed = true;
      for (const size_t peer : made.ranks) {
        messages_.emplace_back([this, peer, call] {
          if (isMade(peer, call)) {
            leave(peer, call);
          }
        });
      }
    } else if (made.proposed.size() == made.ranks.size() && !made.has_failed) {
      uint64_t turn = 0;
      for (const auto& [proposer, proposal] : made.proposed) {
        turn = std::max(turn, proposal);
      }
      for (const size_t peer : made.ranks) {
        messages_.emplace_back([this, peer, call, turn] { orderOf(peer, call).agree(places_[peer].at(call), turn); });
      }
    }
  }

  void leave(size_t rank, size_t call) {
    if (orderOf(rank, call).leave(places_[rank].at(call))) {
      left_[rank].insert(call);
    }
    endTogether(rank);
  }

  /// Who has not made the call promises to make it later.
  void ask(size_t rank, size_t call, size_t peer, uint64_t turn) {
    if (!isMade(peer, call)) {
      orderOf(peer, call).promise(turn);
      messages_.emplace_back([this, rank, call, turn] { orderOf(rank, call).comesAfter(places_[rank].at(call), turn); });
    }
  }

  std::mt19937_64 random_;
  std::vector<TestCall> calls_;
  std::vector<std::vector<std::shared_ptr<CallOrder>>> orders_;  ///< by rank and group
  std::vector<std::vector<std::vector<size_t>>> scripts_;        ///< by rank, what is left: calls that it makes together
  std::vector<std::map<size_t, uint64_t>> places_;               ///< by rank and call
  std::vector<std::vector<size_t>> launched_;                    ///< by rank, in order
  std::vector<std::set<size_t>> left_;
  std::vector<std::function<void()>> messages_;
};

TEST(CallOrder, RanksOfSeveralGroupsLaunchInOneOrder) {
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    Ranks ranks(seed, false);
    ASSERT_TRUE(ranks.run()) << seed;
    ASSERT_TRUE(ranks.isOneOrder()) << seed;
  }
}

TEST(CallOrder, AnOrderPerGroupWouldNot) {
  int num_contradictions = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Ranks ranks(seed, true);
    ranks.run();
    num_contradictions += ranks.isOneOrder() ? 0 : 1;
  }
  EXPECT_GT(num_contradictions, 10);
}

TEST(CallOrder, EqualTurnsGoByNameWhateverWasMadeFirst) {
  for (const bool is_swapped : {false, true}) {
    CallOrder order;
    std::vector<uint64_t> launched;
    std::map<uint64_t, uint64_t> ids;
    for (const uint64_t group : is_swapped ? std::vector<uint64_t>{2, 1} : std::vector<uint64_t>{1, 2}) {
      ids[group] = order.propose({group, 7}, {[&launched, group] { launched.push_back(group); }, [](uint64_t) {}}).id;
    }
    order.agree(ids[2], 5);
    order.agree(ids[1], 5);
    EXPECT_EQ(launched, (std::vector<uint64_t>{1, 2}));
    EXPECT_FALSE(order.leave(ids[1]));
  }
}

TEST(CallOrder, CallsOfOneNameDoNotTakeEachOthersPlace) {
  CallOrder order;
  int num_launched = 0;
  const CallOrder::Told told{[&num_launched] { ++num_launched; }, [](uint64_t) {}};
  const CallOrder::Place first = order.propose({1, 1}, told);
  const CallOrder::Place second = order.propose({1, 1}, told);
  order.agree(second.id, 9);
  order.agree(first.id, 9);
  EXPECT_EQ(num_launched, 2);
}

TEST(CallOrder, WhoHoldsOthersIsToldOncePerTurn) {
  CallOrder order;
  std::vector<uint64_t> told;
  std::vector<int> launched;
  const CallOrder::Place first = order.propose({1, 1}, {[&] { launched.push_back(1); }, [&told](uint64_t turn) { told.push_back(turn); }});
  const CallOrder::Place second = order.propose({2, 1}, {[&] { launched.push_back(2); }, [](uint64_t) {}});
  order.agree(second.id, 4);
  order.promise(3);
  const CallOrder::Place third = order.propose({2, 2}, {[&] { launched.push_back(3); }, [](uint64_t) {}});
  EXPECT_EQ(third.turn, 5U);
  EXPECT_EQ(told, std::vector<uint64_t>{4});
  order.comesAfter(first.id, 4);
  EXPECT_EQ(launched, std::vector<int>{2});
  EXPECT_TRUE(order.leave(third.id));
  order.agree(first.id, 6);
  EXPECT_EQ(launched, (std::vector<int>{2, 1}));
}

}  // namespace
}  // namespace xmesh::runtime
