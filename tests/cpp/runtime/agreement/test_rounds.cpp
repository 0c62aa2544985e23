#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "runtime/agreement/rounds.h"

namespace xmesh::runtime {
namespace {

/// n ranks whose Notices arrive in any order; each carries on whom its sender has compared itself with so far.
class Circle {
 public:
  explicit Circle(int num_ranks) : rounds_(static_cast<size_t>(num_ranks), AgreementRounds(static_cast<size_t>(num_ranks))) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      compared_.push_back({rank});
      send(rank);
    }
  }

  void run(std::mt19937_64& random) {
    while (!on_their_way_.empty()) {
      std::swap(on_their_way_[random() % on_their_way_.size()], on_their_way_.back());
      const Message message = on_their_way_.back();
      on_their_way_.pop_back();
      AgreementRounds& receiver = rounds_[static_cast<size_t>(message.receiver)];
      receiver.hear(message.round);
      heard_[static_cast<size_t>(message.receiver)].push_back(message);
      while (receiver.advance()) {
        for (const Message& heard : heard_[static_cast<size_t>(message.receiver)]) {
          if (heard.round < receiver.round() || receiver.isDone()) {
            compared_[static_cast<size_t>(message.receiver)].insert(heard.compared.begin(), heard.compared.end());
          }
        }
        send(message.receiver);
      }
    }
  }

  bool allDone() const {
    return std::all_of(rounds_.begin(), rounds_.end(), [](const AgreementRounds& one) { return one.isDone(); });
  }
  const std::vector<std::set<int>>& compared() const { return compared_; }
  int numMessages() const { return num_messages_; }

 private:
  struct Message {
    int receiver = 0;
    uint8_t round = 0;
    std::set<int> compared;
  };

  void send(int rank) {
    const AgreementRounds& rounds = rounds_[static_cast<size_t>(rank)];
    const int num_ranks = static_cast<int>(rounds_.size());
    if (!rounds.isDone()) {
      on_their_way_.push_back({static_cast<int>((rank + rounds.distance()) % num_ranks), rounds.round(), compared_[static_cast<size_t>(rank)]});
      ++num_messages_;
    }
  }

  std::vector<AgreementRounds> rounds_;
  std::vector<std::set<int>> compared_;
  std::vector<Message> on_their_way_;
  std::map<size_t, std::vector<Message>> heard_;
  int num_messages_ = 0;
};

TEST(AgreementRounds, EveryPairIsComparedWhateverTheOrder) {
  std::mt19937_64 random(1);
  for (int num_ranks = 1; num_ranks <= 17; ++num_ranks) {
    for (int turn = 0; turn < 20; ++turn) {
      Circle circle(num_ranks);
      circle.run(random);
      EXPECT_TRUE(circle.allDone()) << num_ranks;
      for (const std::set<int>& one : circle.compared()) {
        EXPECT_EQ(one.size(), static_cast<size_t>(num_ranks));
      }
      int num_rounds = 0;
      while ((1 << num_rounds) < num_ranks) {
        ++num_rounds;
      }
      EXPECT_EQ(circle.numMessages(), num_ranks * num_rounds);
    }
  }
}

TEST(AgreementRounds, KnowsWhoseNoticeIsMissing) {
  AgreementRounds rounds(6);  // three rounds: 1, 2, 4 places before
  rounds.hear(1);
  EXPECT_FALSE(rounds.advance());
  std::vector<int64_t> missing;
  rounds.forEachMissing([&](int64_t distance) { missing.push_back(distance); });
  EXPECT_EQ(missing, (std::vector<int64_t>{1, 4}));
  rounds.hear(0);
  EXPECT_TRUE(rounds.advance());
  EXPECT_TRUE(rounds.advance());
  EXPECT_FALSE(rounds.isDone());
  EXPECT_EQ(rounds.distance(), 4);
}

TEST(AgreementRounds, OneRankHasNothingToDo) { EXPECT_TRUE(AgreementRounds(1).isDone()); }

}  // namespace
}  // namespace xmesh::runtime
