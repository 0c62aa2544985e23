#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/pipeline/generators.h"
#include "core/pipeline/validate.h"

namespace xmesh::core {
namespace {

std::string refusal(const Schedule& schedule, const std::vector<StageEdge>& edges, ScheduleCheck check = {}) {
  try {
    validateSchedule(schedule, edges, check);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return {};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// Independent judge: places are machines with channels. A forward takes one message from the channel of each edge into its stage and puts one on
/// each edge out of it; a channel is a queue, and a message for another microbatch than the one that is wanted blocks (or, with loose channels, is
/// passed by). Every stage and microbatch must end with its forward and its backward, whole or both halves, run once.
class ChannelMachine {
 public:
  ChannelMachine(const Schedule& schedule, std::vector<StageEdge> edges, bool is_in_order)
      : schedule_(schedule), edges_(std::move(edges)), is_in_order_(is_in_order) {}

  bool runs() {
    std::vector<std::vector<Action>> lists;
    for (int32_t place = 0; place < schedule_.numPlaces(); ++place) {
      lists.push_back(schedule_.actionsOf(place));
    }
    std::vector<size_t> next(lists.size(), 0);
    bool has_moved = true;
    while (has_moved) {
      has_moved = false;
      for (size_t place = 0; place < lists.size(); ++place) {
        while (next[place] < lists[place].size() && tryRun(lists[place][next[place]])) {
          ++next[place];
          has_moved = true;
        }
      }
    }
    for (size_t place = 0; place < lists.size(); ++place) {
      if (next[place] < lists[place].size()) {
        return false;
      }
    }
    for (int32_t stage = 0; stage < schedule_.num_stages; ++stage) {
      for (int32_t microbatch = 0; microbatch < schedule_.num_microbatches; ++microbatch) {
        const auto isDone = [&](ActionKind kind) { return done_.count({kind, stage, microbatch}) > 0; };
        if (!isDone(ActionKind::kForward) ||
            !(isDone(ActionKind::kBackward) || (isDone(ActionKind::kBackwardInput) && isDone(ActionKind::kBackwardWeight)))) {
          return false;
        }
      }
    }
    return !is_doubled_;
  }

 private:
  using Channel = std::pair<size_t, bool>;  // edge, backward

  bool has(const Channel& channel, int32_t microbatch) {
    const std::deque<int32_t>& queue = channels_[channel];
    const StageEdge& edge = edges_[channel.first];
    const bool is_local = schedule_.place_of_stage[static_cast<size_t>(edge.from)] == schedule_.place_of_stage[static_cast<size_t>(edge.to)];
    return is_in_order_ && !is_local ? !queue.empty() && queue.front() == microbatch : std::count(queue.begin(), queue.end(), microbatch) > 0;
  }

  bool tryRun(const Action& action) {
    const bool is_backward = action.kind != ActionKind::kForward;
    const bool is_weight = action.kind == ActionKind::kBackwardWeight;
    const ActionKind before = is_weight ? ActionKind::kBackwardInput : ActionKind::kForward;
    if (is_backward && done_.count({before, action.stage, action.microbatch}) == 0) {
      return false;
    }
    if (is_weight) {
      is_doubled_ = is_doubled_ || !done_.insert(action).second;
      return true;
    }
    std::vector<Channel> takes;
    for (size_t i = 0; i < edges_.size(); ++i) {
      if ((is_backward ? edges_[i].from : edges_[i].to) == action.stage) {
        takes.emplace_back(i, is_backward);
      }
    }
    for (const Channel& channel : takes) {
      if (!has(channel, action.microbatch)) {
        return false;
      }
    }
    for (const Channel& channel : takes) {
      std::deque<int32_t>& queue = channels_[channel];
      queue.erase(std::find(queue.begin(), queue.end(), action.microbatch));
    }
    for (size_t i = 0; i < edges_.size(); ++i) {
      if ((is_backward ? edges_[i].to : edges_[i].from) == action.stage) {
        channels_[{i, is_backward}].push_back(action.microbatch);
      }
    }
    is_doubled_ = is_doubled_ || !done_.insert(action).second;
    return true;
  }

  const Schedule& schedule_;
  std::vector<StageEdge> edges_;
  bool is_in_order_;
  bool is_doubled_ = false;
  std::map<Channel, std::deque<int32_t>> channels_;
  std::set<Action> done_;
};

std::vector<StageEdge> randomEdges(int32_t num_stages, std::mt19937_64& rng) {
  std::vector<StageEdge> edges = chainEdges(num_stages);
  for (int32_t from = 0; from < num_stages; ++from) {
    for (int32_t to = from + 2; to < num_stages; ++to) {
      if (rng() % 3 == 0) {
        edges.push_back({from, to});
      }
    }
  }
  return edges;
}

/// One small change: two cells of a place swapped, a cell dropped, doubled on its place, or put on another one.
Schedule mutated(Schedule schedule, std::mt19937_64& rng) {
  for (auto& cells : schedule.cells) {
    std::erase_if(cells, [](const auto& cell) { return !cell; });
  }
  auto& cells = schedule.cells[rng() % schedule.cells.size()];
  const size_t first = rng() % cells.size();
  const size_t second = rng() % cells.size();
  switch (rng() % 6) {
    case 0:
      cells.erase(cells.begin() + static_cast<ptrdiff_t>(first));
      break;
    case 1:
      cells.insert(cells.begin() + static_cast<ptrdiff_t>(second), cells[first]);
      break;
    case 2:
      std::swap(cells[first], cells[first + 1 < cells.size() ? first + 1 : first]);
      break;
    default:
      std::swap(cells[first], cells[second]);
  }
  return schedule;
}

TEST(PipelineValidate, AgreesWithAnIndependentMachineOnMutatedSchedules) {
  int32_t num_valid = 0;
  int32_t num_rendezvous = 0;
  std::mt19937_64 rng(7);
  const std::vector<std::string> names = scheduleNames();
  for (int32_t i = 0; i < 6000; ++i) {
    const auto num_places = static_cast<int32_t>(1 + rng() % 4);
    const std::string& name = names[rng() % names.size()];
    const bool is_shared = (name == "gpipe" || name == "interleaved_1f1b") && rng() % 2 == 0;
    std::vector<int32_t> place_of_stage;
    for (int32_t stage = 0; stage < num_places * (is_shared ? 2 : 1); ++stage) {
      place_of_stage.push_back(stage % num_places);
    }
    const auto num_stages = static_cast<int32_t>(place_of_stage.size());
    const Schedule schedule = mutated(makeSchedule(name, num_stages, static_cast<int32_t>(1 + rng() % 5), place_of_stage), rng);
    const std::vector<StageEdge> edges = randomEdges(num_stages, rng);
    const bool is_buffered = ChannelMachine(schedule, edges, false).runs();
    const bool is_valid = ChannelMachine(schedule, edges, true).runs();
    const std::string message = refusal(schedule, edges);
    ASSERT_EQ(message.empty(), is_valid) << message << schedule.str();
    ASSERT_EQ(contains(message, "in-order rendezvous"), is_buffered && !is_valid) << message << schedule.str();
    ASSERT_TRUE(message.empty() || (contains(message, ">") && contains(message, "<"))) << message;
    num_valid += is_valid;
    num_rendezvous += is_buffered && !is_valid;
  }
  EXPECT_GT(num_valid, 100);
  EXPECT_GT(num_rendezvous, 100);
}

TEST(PipelineValidate, MarksTheBadCell) {
  EXPECT_EQ(refusal(scheduleFromCsv("0F0,0F1,0B0,0B1\n1F0,1B1,1F1,1B0\n", "mine"), chainEdges(2)),
            "schedule 'mine', place 1, cell 1: 1B1 comes before 1F1 (cell 2), which it needs\n"
            "stage 0 | F0   F1   B0   B1\n"
            "stage 1 | F0   >B1< F1   B0\n");
  EXPECT_EQ(refusal(scheduleFromCsv("0F0,0F1,0B0,0B1\n1F0,1F1,1F0,1B0,1B1\n", "mine"), chainEdges(2)),
            "schedule 'mine', place 1, cell 2: 1F0 is doubled: it stands in cell 0 already\n"
            "stage 0 | F0   F1   B0   B1\n"
            "stage 1 | F0   F1   >F0< B0   B1\n");
}

TEST(PipelineValidate, EveryMutationIsRefusedAtItsCell) {
  const Schedule schedule = makeSchedule("1f1b", 3, 5);
  const std::vector<StageEdge> edges = chainEdges(3);
  for (int32_t place = 0; place < 3; ++place) {
    const auto row = static_cast<size_t>(place);
    for (size_t i = 0; i < schedule.cells[row].size(); ++i) {
      if (!schedule.cells[row][i]) {
        continue;
      }
      const Action action = *schedule.cells[row][i];
      const std::string at = "place " + std::to_string(place) + ", cell ";
      Schedule dropped = schedule;
      dropped.cells[row][i].reset();
      const std::string last = std::to_string(schedule.cells[row].size() - 1);
      EXPECT_TRUE(contains(refusal(dropped, edges), at + last + ": " + action.str())) << refusal(dropped, edges);
      Schedule doubled = schedule;
      doubled.cells[row].emplace_back(action);
      EXPECT_TRUE(contains(refusal(doubled, edges), at + std::to_string(schedule.cells[row].size()) + ": " + action.str() + " is doubled"));
      if (action.kind == ActionKind::kForward) {
        const Action backward{ActionKind::kBackward, action.stage, action.microbatch};
        Schedule swapped = schedule;
        auto& cells = swapped.cells[row];
        std::swap(cells[i], *std::find(cells.begin(), cells.end(), std::optional(backward)));
        EXPECT_TRUE(contains(refusal(swapped, edges), at + std::to_string(i) + ": " + backward.str() + " comes before " + action.str()));
      }
    }
  }
  Schedule moved = schedule;
  moved.cells[2].emplace_back(Action{ActionKind::kForward, 1, 0});
  EXPECT_TRUE(contains(refusal(moved, edges), "1F0 is on another place than its stage, which is on place 1"));
}

TEST(PipelineValidate, Missing) {
  const std::string no_backward = refusal(scheduleFromCsv("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n"), chainEdges(2));
  EXPECT_TRUE(contains(no_backward, "place 0, cell 2: 0B1 (or 0I1 and 0W1) is missing")) << no_backward;
  const std::string no_weight = refusal(scheduleFromCsv("0F0,0I0\n"), {});
  EXPECT_TRUE(contains(no_weight, "0W0 is missing")) << no_weight;
  const std::string no_input = refusal(scheduleFromCsv("0F0,0W0\n"), {});
  EXPECT_TRUE(contains(no_input, "0I0 is missing")) << no_input;
  const std::string no_forward = refusal(scheduleFromCsv("0F0,0B1,0B0\n"), {});
  EXPECT_TRUE(contains(no_forward, "0F1 is missing")) << no_forward;
}

TEST(PipelineValidate, SplitBackward) {
  EXPECT_EQ(refusal(scheduleFromCsv("0F0,0F1,0I0,0W0,0B1\n1F0,1I0,1F1,1B1,1W0\n"), chainEdges(2)), "");
  EXPECT_TRUE(contains(refusal(scheduleFromCsv("0F0,0W0,0I0\n"), {}), "cell 1: 0W0 comes before 0I0"));
  EXPECT_TRUE(contains(refusal(scheduleFromCsv("0F0,0B0,0I0,0W0\n"), {}), "cell 2: 0I0 doubles part of 0B0"));
}

TEST(PipelineValidate, BufferedDeadlockNamesTheCircle) {
  const std::string message = refusal(scheduleFromCsv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"), chainEdges(2));
  EXPECT_TRUE(contains(message, "deadlock with buffered sends: place 0 at 0B0 waits for 1B0 of place 1; place 1 at 1F1 waits for 0F1 of place 0"))
      << message;
  EXPECT_TRUE(contains(message, ">B0<")) << message;
}

TEST(PipelineValidate, RendezvousNeedsTheSameOrderOnBothSides) {
  const std::string message = refusal(scheduleFromCsv("0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n"), chainEdges(2));
  EXPECT_TRUE(
      contains(message, "deadlock with in-order rendezvous: value number 0 from stage 0 to stage 1 is sent for 1F0 (after 0F0) but received for 1F1"))
      << message;
  EXPECT_TRUE(contains(message, ">F1<")) << message;
  const std::string backward = refusal(scheduleFromCsv("0F0,0F1,0B0,0B1\n1F0,1F1,1B1,1B0\n"), chainEdges(2));
  EXPECT_TRUE(contains(backward, "gradient number 0 from stage 1 to stage 0")) << backward;
  EXPECT_EQ(refusal(scheduleFromCsv("0F0,0F1,0B0,0B1\n1F0,1F1,1B1,1B0\n"), {{0, 1, false}}), "") << "no gradient crosses, so no order is needed";
}

TEST(PipelineValidate, SkipEdgesOrderTheirStages) {
  const Schedule schedule = scheduleFromCsv("0F0,0B0\n1F0,1B0\n2F0,2B0\n");
  EXPECT_EQ(refusal(schedule, {{0, 1}, {1, 2}, {0, 2}}), "");
  EXPECT_TRUE(contains(refusal(schedule, {{1, 0}}), "an edge goes from an earlier to a later of 3 stages, got 1 -> 0"));
  const Schedule shared = scheduleFromCsv("2F0,0F0,0B0,2B0\n1F0,1B0\n");
  EXPECT_TRUE(contains(refusal(shared, {{0, 2}}), "place 0, cell 0: 2F0 comes before 0F0"));
}

TEST(PipelineValidate, ForwardOnly) {
  const Schedule schedule = makeSchedule("1f1b", 3, 4);
  EXPECT_EQ(refusal(forwardsOf(schedule), chainEdges(3), {true}), "");
  EXPECT_TRUE(contains(refusal(schedule, chainEdges(3), {true}), "0B0 is a backward in a schedule of forwards only"));
  EXPECT_TRUE(contains(refusal(forwardsOf(schedule), chainEdges(3)), "0B0 (or 0I0 and 0W0) is missing"));
}

}  // namespace
}  // namespace xmesh::core
