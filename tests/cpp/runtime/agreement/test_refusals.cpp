#include <gtest/gtest.h>

#include <future>
#include <numeric>
#include <random>

#include "runtime/fake_networks.h"

// Programs of calls that some ranks refuse, with and without a name, run in any order that the network allows: who calls is told of the refusal, and
// the next call works.

namespace xmesh::runtime {
namespace {

constexpr int32_t kNumRanks = 4;

enum class Deed : uint8_t { kCall, kRefuse, kRefuseUnnamed };

/// One line of the program that all ranks run.
struct Step {
  std::vector<int64_t> participants;
  std::vector<Deed> deeds;     ///< by participant
  std::vector<int64_t> known;  ///< what an unnamed refusal knows of the participants
};

std::vector<int64_t> everyRank() {
  std::vector<int64_t> out(kNumRanks);
  std::iota(out.begin(), out.end(), 0);
  return out;
}

/// A reshard that moves nothing.
std::shared_ptr<const PreparedPlan> planOf(const Step& step, int64_t rank, size_t line) {
  auto out = std::make_shared<PreparedPlan>();
  out->terms.participants = participantsOf(step.participants, rank);
  out->terms.fields = packFields({{"line", std::to_string(line)}});
  out->terms.fingerprint = std::to_string(line);  // calls of different lines must never meet
  out->terms.summary = "a call of line " + std::to_string(line);
  auto nothing = std::make_shared<Program>();
  nothing->global_rank = rank;
  out->program = std::move(nothing);
  return out;
}

/// One rank's way through the program.
class Runner {
 public:
  Runner(int32_t rank, transport::FakeHostNetwork& network) : rank_(rank), service_(hostService(network, everyRank(), rank)) {
    for (int32_t peer = 0; peer < kNumRanks; ++peer) {
      if (peer != rank) {
        service_->network().setAddress(peer, "fake");
      }
    }
  }

  bool isDone(const std::vector<Step>& program) const { return line_ == program.size(); }

  /// Goes on by one deed; false where it waits.
  bool advance(const std::vector<Step>& program) {
    if (isDone(program)) {
      return false;
    }
    const Step& step = program[line_];
    const auto me = std::find(step.participants.begin(), step.participants.end(), rank_);
    if (me == step.participants.end()) {
      ++line_;
      return true;
    }
    const std::vector<int32_t> all(step.participants.begin(), step.participants.end());
    switch (step.deeds[static_cast<size_t>(me - step.participants.begin())]) {
      case Deed::kRefuse:
        service_->refusals().refuse(step.participants, all, "a mistake");
        ++line_;
        return true;
      case Deed::kRefuseUnnamed:
        service_->refusals().refuseUnnamed(step.known, {0, 1, 2, 3}, "an empty list");
        ++line_;
        return true;
      case Deed::kCall:
        return advanceCall(step);
    }
    return false;
  }

  std::string where() const {
    return "rank " + std::to_string(rank_) + " is in line " + std::to_string(line_) +
           (call_ == nullptr ? ", before its call" : ", in call " + std::to_string(call_->key().count));
  }

 private:
  bool advanceCall(const Step& step) {
    if (call_ == nullptr) {
      if (!settled_.valid()) {
        settled_ = service_->refusals().settle(planOf(step, rank_, line_)->terms.participants);
      }
      if (settled_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
        return false;
      }
      settled_ = {};
      ReshardRequest request;
      request.movement.prepared = planOf(step, rank_, line_);
      call_ = service_->reshard(std::move(request));
      return true;
    }
    if (!call_->isCompleted()) {
      return false;
    }
    const bool is_refused = std::any_of(step.deeds.begin(), step.deeds.end(), [](Deed deed) { return deed != Deed::kCall; });
    const std::string text = call_->failure().has_value() ? call_->failure()->text : "";
    EXPECT_EQ(text.find("refused this call") != std::string::npos, is_refused) << "rank " << rank_ << " line " << line_ << ": " << text;
    EXPECT_EQ(text.empty(), !is_refused) << text;
    call_ = nullptr;
    ++line_;
    return true;
  }

  int32_t rank_;
  std::unique_ptr<ReshardService> service_;
  size_t line_ = 0;
  std::future<void> settled_;
  std::shared_ptr<ReshardCall> call_;
};

class RefusalsTest : public testing::TestWithParam<uint64_t> {
 protected:
  void run(const std::vector<Step>& program) {
    std::mt19937_64 random(GetParam() * 77 + 5);
    transport::FakeHostNetwork network(kNumRanks, GetParam());
    std::vector<std::unique_ptr<Runner>> runners;
    for (int32_t rank = 0; rank < kNumRanks; ++rank) {
      runners.push_back(std::make_unique<Runner>(rank, network));
    }
    const auto is_done = [&] { return std::all_of(runners.begin(), runners.end(), [&](const auto& runner) { return runner->isDone(program); }); };
    while (!is_done()) {
      bool has_moved = false;
      if (random() % 4 == 0) {
        has_moved = runners[random() % kNumRanks]->advance(program);
      } else {
        has_moved = network.step();
      }
      for (size_t i = 0; !has_moved && i < kNumRanks; ++i) {
        has_moved = runners[i]->advance(program);
      }
      if (!has_moved && !network.step()) {
        std::string where;
        for (const auto& runner : runners) {
          where += "\n  " + runner->where();
        }
        FAIL() << "nobody can go on:" << where;
      }
      if (HasFailure()) {
        return;
      }
    }
    network.runUntilIdle();
  }

  static Step good(std::vector<int64_t> participants = everyRank()) {
    std::vector<Deed> deeds(participants.size(), Deed::kCall);
    return {std::move(participants), std::move(deeds), {}};
  }
};

TEST_P(RefusalsTest, AnySubsetRefusesAndTheNextCallWorks) {
  for (uint32_t refusers = 1; refusers < 16; ++refusers) {
    Step step = good();
    for (size_t rank = 0; rank < kNumRanks; ++rank) {
      if ((refusers >> rank & 1U) != 0) {
        step.deeds[rank] = Deed::kRefuseUnnamed;
      }
    }
    run({good(), step, good(), step, step, good(), good()});
    if (HasFailure()) {
      FAIL() << "refusers " << refusers;
    }
  }
}

TEST_P(RefusalsTest, RandomMistakesInEveryCombination) {
  std::mt19937_64 random(GetParam());
  std::vector<Step> program;
  for (int line = 0; line < 30; ++line) {
    Step step = good();
    if (random() % 2 == 0) {
      step.known = random() % 2 == 0 ? std::vector<int64_t>{2, 3} : std::vector<int64_t>{};
      for (Deed& deed : step.deeds) {
        deed = static_cast<Deed>(random() % 3);
      }
    }
    program.push_back(step);
  }
  program.push_back(good());
  run(program);
}

/// What one rank refused is not taken for the call of other participants that comes after it, nor what all refused.
TEST_P(RefusalsTest, CallsOfSomeRanksAfterARefusal) {
  std::mt19937_64 random(GetParam());
  const std::vector<std::vector<int64_t>> groups = {{0, 1}, {2, 3}, {0, 1, 2}, {1, 3}, {0, 3}};
  std::vector<Step> program;
  for (int line = 0; line < 10; ++line) {
    Step step = good();
    if (random() % 2 == 0) {
      step.deeds[random() % kNumRanks] = Deed::kRefuseUnnamed;
    } else {
      step.deeds.assign(kNumRanks, Deed::kRefuseUnnamed);
    }
    program.push_back(step);
    for (int i = 0; i < 3; ++i) {
      program.push_back(good(groups[random() % groups.size()]));
    }
    program.push_back(good());
  }
  run(program);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RefusalsTest, testing::Range<uint64_t>(0, 40));

}  // namespace
}  // namespace xmesh::runtime
