#include "core/pipeline/choose_schedule.h"

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "core/pipeline/generators.h"
#include "core/pipeline/play.h"
#include "core/pipeline/segment_order.h"
#include "core/pipeline/split_order.h"
#include "core/pipeline/validate.h"

namespace xmesh::core {
namespace {

constexpr double kNoise = .04;         ///< noise of the runs by which candidates are compared
constexpr double kPerturbation = .15;  ///< noise of the costs for which further orders are planned
constexpr double kTie = 1.003;         ///< as fast as the fastest: the one that holds least is taken
constexpr int32_t kMostNoisyRuns = 4;
constexpr int32_t kMostSeeds = 12;
constexpr int64_t kScreened = 40'000;       ///< actions of a schedule on which bounds are tried; longer ones repeat themselves
constexpr int64_t kMostPlayed = 4'000'000;  ///< actions played to plan and compare, all together; about a second each million
constexpr int64_t kConsidered = 40;         ///< candidates, about: each gets its part of that
constexpr size_t kMostCompared = 8;         ///< orders of segments, the fastest without noise, that are compared with it
/// How segments are ordered, the most promising first.
constexpr std::array kSegmentRules = {
    SegmentRule{.most_open = 3},
    SegmentRule{.most_open = 2},
    SegmentRule{.most_open = 4},
    SegmentRule{.most_open = 2, .is_split = false},
    SegmentRule{.most_open = 3, .backward_first = true},
    SegmentRule{.most_open = 2, .backward_first = true},
    SegmentRule{.most_open = 4, .backward_first = true},
    SegmentRule{.most_open = 3, .is_split = false},
    SegmentRule{.most_open = 4, .is_split = false},
    SegmentRule{.most_open = 1},
    SegmentRule{.most_open = 3, .is_split = false, .backward_first = true},
    SegmentRule{.most_open = 4, .is_split = false, .backward_first = true},
};
constexpr int64_t kOrdered = kMostPlayed / 8;  ///< actions played to order segments
constexpr int32_t kMostMore = 2;               ///< microbatches more than in 1f1b, in the orders of stages that they are made from
constexpr size_t kRemade = 2;                  ///< planned orders that are made again for all microbatches of a long schedule

int64_t numActions(const PipelineShape& shape) { return 3 * int64_t{shape.num_stages} * shape.num_microbatches; }

/// How often something that plays `actions` actions may be done within the budget.
int32_t affordable(int64_t actions, int32_t most) { return static_cast<int32_t>(std::min<int64_t>(kMostPlayed / actions, most)); }

/// Whether every stage adds to its weights' gradients microbatch by microbatch.
bool addsInOrder(const Schedule& schedule) {
  std::vector<int32_t> last(static_cast<size_t>(schedule.num_stages), -1);
  for (const auto& cells : schedule.cells) {
    for (const std::optional<Action>& cell : cells) {
      if (cell && flightChangeOf(cell->kind) == FlightChange::kEnds) {
        int32_t& before = last[static_cast<size_t>(cell->stage)];
        if (cell->microbatch < before) {
          return false;
        }
        before = cell->microbatch;
      }
    }
  }
  return true;
}

/// With the empty cells of a picture, where the stages are a chain.
Schedule aligned(Schedule schedule) {
  try {
    return alignCells(schedule);
  } catch (const InvalidArgument&) {
    return schedule;
  }
}

class Search {
 public:
  explicit Search(const ScheduleQuestion& question)
      : question_(question),
        shape_{static_cast<int32_t>(question.place_of_stage.size()), question.num_microbatches, question.place_of_stage},
        is_divided_(question.segments.isDivided()),
        edges_(edgesOf(question.costs)) {}

  ScheduleChoice run() {
    const std::vector<Schedule> named = byName();
    for (const Schedule& schedule : named) {
      consider(dividedInto(schedule, question_.segments));
    }
    if (is_divided_) {
      considerSegments(named);
    } else {
      considerPlanned();
    }
    std::vector<ScheduleCandidate>& candidates = out_.candidates;
    std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) { return a.noisy_s < b.noisy_s; });
    double fastest_s = 0;
    for (size_t i = 0; i < candidates.size(); ++i) {
      if (question_.memory_limit_bytes && candidates[i].peak() > *question_.memory_limit_bytes) {
        continue;
      }
      if (!addsInOrder(candidates[i].schedule)) {
        continue;  // others are as fast, and give the bits that every other schedule gives
      }
      const auto index = static_cast<int32_t>(i);
      if (out_.best < 0) {
        out_.best = index;
        fastest_s = candidates[i].noisy_s;
      } else if (candidates[i].noisy_s <= kTie * fastest_s && candidates[i].peak() < candidates[static_cast<size_t>(out_.best)].peak()) {
        out_.best = index;
      }
    }
    return std::move(out_);
  }

 private:
  /// Of whole stages.
  std::vector<Schedule> byName() const {
    std::vector<Schedule> out;
    for (const std::string& name : scheduleNames()) {
      out.push_back(makeSchedule(name, shape_.num_stages, shape_.num_microbatches, shape_.place_of_stage));
    }
    out.push_back(oneInFlight());
    return out;
  }

  bool canRunEarly() const {
    const std::vector<uint8_t>& early = question_.costs.runs_weights_early;
    return std::find(early.begin(), early.end(), 1) != early.end();
  }

  /// Seconds without noise, and their mean with runs that have noise.
  std::pair<double, double> played(const ActionTable& table, ScheduleCosts costs) const {
    const int64_t times = kConsidered * (canRunEarly() ? 2 : 1) * (is_divided_ ? 4 : 1);
    const int32_t num_runs = affordable(times * table.numNodes(), kMostNoisyRuns);
    double step_s = 0;
    double noisy_s = 0;
    for (int32_t run = 0; run <= num_runs; ++run) {
      costs.noise = run == 0 ? 0 : kNoise;
      costs.noise_seed = static_cast<uint64_t>(run);
      InOrder in_order(table, costs);
      const double seconds = play(table, costs, in_order).makespan_s;
      step_s = run == 0 ? seconds : step_s;
      noisy_s += seconds / (num_runs + 1);
    }
    return {step_s, noisy_s};
  }

  ScheduleCandidate judged(Schedule schedule) const {
    ScheduleCandidate candidate;
    validateSchedule(schedule, edges_);
    candidate.schedule = std::move(schedule);
    const ActionTable table(candidate.schedule, edges_);
    ScheduleCosts costs = question_.costs;
    costs.runs_weights_early.clear();
    std::tie(candidate.step_s, candidate.noisy_s) = played(table, costs);
    if (canRunEarly()) {
      const auto [step_s, noisy_s] = played(table, question_.costs);
      if (noisy_s < candidate.noisy_s) {
        candidate.step_s = step_s;
        candidate.noisy_s = noisy_s;
        candidate.runs_weights_early = true;
      }
    }
    candidate.peak_bytes = peakBytes(candidate.schedule, question_.costs);
    return candidate;
  }

  /// Nothing where the order cannot run over these edges (some skip stages); throws where it is the first of all.
  std::optional<ScheduleCandidate> judgedIfValid(Schedule schedule) const {
    try {
      return judged(std::move(schedule));
    } catch (const InvalidArgument&) {
      if (out_.candidates.empty()) {
        throw;
      }
      return std::nullopt;
    }
  }

  void consider(Schedule schedule) {
    if (std::optional<ScheduleCandidate> candidate = judgedIfValid(std::move(schedule))) {
      add(std::move(*candidate));
    }
  }

  /// Leaves out what is there already under another name.
  void add(ScheduleCandidate candidate) {
    const auto isSame = [&](const ScheduleCandidate& other) {
      for (int32_t place = 0; place < candidate.schedule.numPlaces(); ++place) {
        if (candidate.schedule.actionsOf(place) != other.schedule.actionsOf(place)) {
          return false;
        }
      }
      return true;
    };
    if (std::none_of(out_.candidates.begin(), out_.candidates.end(), isSame)) {
      out_.candidates.push_back(std::move(candidate));
    }
  }

  /// What needs least memory.
  Schedule oneInFlight() const {
    return alignCells(asReady("one_in_flight", shape_, {std::vector<int32_t>(static_cast<size_t>(shape_.num_stages), 1), {}}));
  }

  /// How many microbatches each stage may hold, if none holds more than `most` and all keep the limit.
  std::vector<int32_t> within(int32_t most) const {
    std::vector<int32_t> out(static_cast<size_t>(shape_.num_stages), most);
    if (!question_.memory_limit_bytes) {
      return out;
    }
    const std::vector<StageCost>& stages = question_.costs.stages;
    std::vector<int64_t> left(static_cast<size_t>(shape_.numPlaces()), *question_.memory_limit_bytes);
    std::vector<int64_t> each(left.size(), 0);
    for (size_t stage = 0; stage < stages.size(); ++stage) {
      const auto place = static_cast<size_t>(shape_.place_of_stage[stage]);
      left[place] -= stages[stage].fixed_bytes;
      each[place] += std::max(stages[stage].activation_bytes, stages[stage].weight_bytes);
    }
    for (size_t stage = 0; stage < stages.size(); ++stage) {
      const auto place = static_cast<size_t>(shape_.place_of_stage[stage]);
      if (each[place] > 0) {
        out[stage] = static_cast<int32_t>(std::clamp<int64_t>(left[place] / each[place], 1, most));
      }
    }
    return out;
  }

  /// Bounds to try on the microbatches in flight: every small one, and fewer of the larger.
  std::vector<int32_t> bounds() const {
    const int32_t most = std::min(3 * depths(shape_).front(), shape_.num_microbatches);
    std::vector<int32_t> out;
    for (int32_t bound = 1; bound < most; bound += std::max(1, bound / 3)) {
      out.push_back(bound);
    }
    out.push_back(most);
    return out;
  }

  Schedule planned(const PipelineShape& shape, int32_t most, int32_t seed) const {
    ScheduleCosts costs = question_.costs;
    costs.noise = seed == 0 ? 0 : kPerturbation;
    costs.noise_seed = static_cast<uint64_t>(seed);
    costs.overlap = true;
    const std::vector<int32_t> held = within(most);
    return splitAsReady("planned_" + std::to_string(most), shape, {held, held}, costs);
  }

  void considerPlanned() {
    PipelineShape shape = shape_;
    shape.num_microbatches = static_cast<int32_t>(
        std::clamp<int64_t>(kScreened / (3 * shape.num_stages), std::min(4 * shape.num_stages, shape.num_microbatches), shape.num_microbatches));
    const std::vector<int32_t> tried = bounds();
    const int64_t per_seed = numActions(shape) * ((canRunEarly() ? 2 : 1) * (kMostNoisyRuns + 1) + 1) * static_cast<int64_t>(tried.size());
    const int32_t num_seeds = std::max(1, affordable(per_seed, kMostSeeds));
    struct Best {
      int32_t most;
      int32_t seed;
      ScheduleCandidate candidate;
    };
    std::vector<Best> found;
    for (const int32_t most : tried) {
      std::optional<Best> best;
      for (int32_t seed = 0; seed < num_seeds; ++seed) {
        std::optional<ScheduleCandidate> candidate = judgedIfValid(planned(shape, most, seed));
        if (candidate && (!best || candidate->noisy_s < best->candidate.noisy_s)) {
          best = {most, seed, std::move(*candidate)};
        }
      }
      if (best) {
        found.push_back(std::move(*best));
      }
    }
    if (shape.num_microbatches == shape_.num_microbatches) {
      for (Best& best : found) {
        best.candidate.schedule = aligned(std::move(best.candidate.schedule));
        add(std::move(best.candidate));
      }
      return;
    }
    std::erase_if(found, [&](const Best& best) { return question_.memory_limit_bytes && best.candidate.peak() > *question_.memory_limit_bytes; });
    std::stable_sort(found.begin(), found.end(), [](const Best& a, const Best& b) { return a.candidate.noisy_s < b.candidate.noisy_s; });
    for (size_t i = 0; i < std::min(kRemade, found.size()); ++i) {
      consider(aligned(planned(shape_, found[i].most, found[i].seed)));
    }
  }

  /// Orders of segments: from those of stages, and from some that hold more of them.
  void considerSegments(std::vector<Schedule> stages) {
    for (int32_t more = 1; more <= kMostMore; ++more) {
      std::vector<int32_t> most = depths(shape_);
      for (int32_t& own : most) {
        own += more;
      }
      stages.push_back(asReady("1f1b_" + std::to_string(more) + "_more", shape_, {most, {}}));
    }
    stages.push_back(inPairs(shape_));
    consider(duplex(shape_, question_.segments));
    const std::vector<Schedule> bases = withWholeBackwards(std::move(stages));
    std::vector<SegmentOrder> made;
    int64_t left = kOrdered;
    for (const SegmentRule& rule : kSegmentRules) {
      for (auto base = bases.begin(); base != bases.end() && left > 0; ++base) {
        SegmentOrder order = orderSegments(*base, question_.segments, rule, question_.costs);
        left -= numActions({order.schedule.num_stages, order.schedule.num_microbatches, {}});
        if (keepsLimit(peakBytes(order.schedule, question_.costs)) && addsInOrder(order.schedule)) {
          made.push_back(std::move(order));
        }
      }
    }
    std::stable_sort(made.begin(), made.end(), [](const SegmentOrder& a, const SegmentOrder& b) { return a.seconds < b.seconds; });
    for (size_t i = 0; i < std::min(kMostCompared, made.size()); ++i) {
      consider(std::move(made[i].schedule));
    }
  }

  /// Without W, and each once.
  static std::vector<Schedule> withWholeBackwards(std::vector<Schedule> stages) {
    std::vector<Schedule> out;
    for (Schedule& schedule : stages) {
      for (auto& cells : schedule.cells) {
        std::erase_if(cells, [](const auto& cell) { return !cell || crossingOf(cell->kind) == Crossing::kNothing; });
        for (auto& cell : cells) {
          cell->kind = crossingOf(cell->kind) == Crossing::kValues ? ActionKind::kForward : ActionKind::kBackward;
        }
      }
      if (std::none_of(out.begin(), out.end(), [&](const Schedule& other) { return other.cells == schedule.cells; })) {
        out.push_back(std::move(schedule));
      }
    }
    return out;
  }

  bool keepsLimit(const std::vector<int64_t>& peak_bytes) const {
    return !question_.memory_limit_bytes || *std::max_element(peak_bytes.begin(), peak_bytes.end()) <= *question_.memory_limit_bytes;
  }

  const ScheduleQuestion& question_;
  const PipelineShape shape_;
  const bool is_divided_;
  const std::vector<StageEdge> edges_;
  ScheduleChoice out_;
};

}  // namespace

int64_t ScheduleCandidate::peak() const { return *std::max_element(peak_bytes.begin(), peak_bytes.end()); }

ScheduleChoice chooseSchedule(const ScheduleQuestion& question) {
  int32_t num_segments = 0;
  for (size_t stage = 0; stage < question.place_of_stage.size(); ++stage) {
    num_segments += question.segments.countOf(static_cast<int32_t>(stage));
  }
  checkCosts(num_segments, question.costs);
  return Search(question).run();
}

}  // namespace xmesh::core
