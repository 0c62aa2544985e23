#include "core/parallelism/stage_search.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "core/parallelism/stage_plans.h"
#include "core/parallelism/stage_table.h"

namespace xmesh::core {
namespace {

/// A sum of the same seconds in another order is no larger than this many times as large.
constexpr double kOtherOrder = 1 - 1e-12;
/// The tries for one limit and number of stages are those that are left, divided by this.
constexpr size_t kShareOfTries = 16;
/// Times the slowest stage of the best plan: where to look for others.
constexpr double kLooserLimits[] = {1.02, 1.05, 1.1, 1.2, 1.4, 2};

/// The least sums for the first layers, as eq. 3 from the front and without s: each stage takes the fastest of all its options.
class RelaxedTable {
 public:
  RelaxedTable(const StageMoves& moves, const DeviceCounts& counts, size_t num_layers)
      : moves_(moves), counts_(counts), num_layers_(num_layers), rows_(num_layers + 1, counts.size(), kNoTime) {}

  void fill(double t_max) {
    const IndexRange all{0, counts_.size()};
    rows_.clear();
    rows_.set(0, 0, 0);
    for (size_t layer = 0; layer < num_layers_; ++layer) {
      rows_.trim(layer);
      for (const StageMove& move : moves_.from(layer)) {
        if (const double seconds = moves_.choices()[move.first_choice].seconds; seconds <= t_max && !rows_.range(layer).isEmpty()) {
          rows_.join(move.end_layer, layer, move.entering + seconds, counts_.offset(move.submesh), counts_.runs(move.submesh), all, std::plus<>());
        }
      }
    }
  }
  /// No plan's sum is less.
  double leastSum() const { return rows_.at(num_layers_, counts_.last()) * kOtherOrder; }
  /// By layer: the counts of devices from which the layers before it can leave it some.
  std::vector<IndexRange> countsLeft() const {
    std::vector<IndexRange> out(num_layers_);
    for (size_t layer = 0; layer < num_layers_; ++layer) {
      if (const IndexRange& used = rows_.range(layer); !used.isEmpty()) {
        out[layer] = {counts_.size() - used.end, counts_.size() - used.begin};
      }
    }
    return out;
  }

 private:
  const StageMoves& moves_;
  const DeviceCounts& counts_;
  size_t num_layers_;
  CountRows<double> rows_;
};

/// The limits on the slowest stage that may matter, ascending. Of those within epsilon of the first one, the last stands for all.
std::vector<double> limitsOnSlowest(const StageMoves& moves, double epsilon) {
  std::vector<double> all;
  for (const MoveChoice& choice : moves.choices()) {
    all.push_back(choice.seconds);
  }
  std::sort(all.begin(), all.end());
  std::vector<double> out;
  double first = 0;
  for (const double seconds : all) {
    if (out.empty() || seconds > first + epsilon) {
      out.push_back(seconds);
      first = seconds;
    } else {
      out.back() = seconds;
    }
  }
  return out;
}

/// What trying one limit told: no plan that keeps it and can be among the best has a lower sum; one with that sum has this slowest stage.
struct Tried {
  double least_sum = kNoTime;
  double slowest = 0;
};

class StageSearch {
 public:
  StageSearch(const StageProblem& problem, const StageSearchLimits& limits)
      : problem_(problem),
        limits_(limits),
        moves_(problem),
        counts_(problem),
        t_maxes_(limitsOnSlowest(moves_, limits.epsilon)),
        relaxed_(moves_, counts_, problem.num_layers),
        table_(problem, moves_, counts_, kNoTime),
        tries_left_(limits.most_tries) {}

  std::vector<StagePlan> run() {
    if (!t_maxes_.empty()) {
      searchAll();
    }
    if (!best_.empty()) {
      const bool is_proven = !is_stopped_ && best_.front().seconds <= least_missed_;
      addSlower();
      best_.front().is_proven = is_proven;
    }
    return std::move(best_);
  }

 private:
  void searchAll() {
    size_t first = firstFeasible();
    size_t tried_index = first;
    Tried tried;
    for (size_t step = 1; tried_index < t_maxes_.size(); step *= 2) {
      relax(tried_index);
      tried = tryLimit(tried_index, first);
      if (is_stopped_ || !best_.empty() || tried_index + 1 == t_maxes_.size()) {
        break;
      }
      first = tried.least_sum == kNoTime ? tried_index + 1 : first;
      tried_index = std::min(tried_index + step, t_maxes_.size() - 1);
    }
    search(first, tried_index, tried.least_sum);
    search(tried_index + 1, t_maxes_.size(), 0);
  }

  /// Plans other than the best, if there are too few: those within looser limits.
  void addSlower() {
    const double slowest = best_.front().slowest;
    for (const double factor : kLooserLimits) {
      const auto after = std::upper_bound(t_maxes_.begin(), t_maxes_.end(), factor * slowest);
      if (best_.size() >= limits_.count || after == t_maxes_.begin()) {
        return;
      }
      const size_t index = static_cast<size_t>(after - t_maxes_.begin()) - 1;
      relax(index);
      tryLimit(index, 0);
    }
  }

  /// The first limit with which stages that ignore s use all devices.
  size_t firstFeasible() {
    size_t least = 0;
    size_t most = t_maxes_.size();
    while (least < most && !is_stopped_) {
      const size_t middle = least + (most - least) / 2;
      if (relax(middle) < kNoTime) {
        most = middle;
      } else {
        least = middle + 1;
      }
    }
    return least;
  }

  /// Tries those of the limits [begin, end) that can lead to a better plan. No sum that keeps the last of them is below `least_sum`.
  void search(size_t begin, size_t end, double least_sum) {
    if (begin >= end || is_stopped_ || least_sum + wait(t_maxes_[begin]) >= bestSeconds()) {
      return;
    }
    const size_t last = end - 1;
    least_sum = std::max(least_sum, relax(last));
    if (least_sum + wait(t_maxes_[begin]) >= bestSeconds()) {
      return;
    }
    end = last;
    if (least_sum + wait(t_maxes_[last]) < bestSeconds()) {
      const Tried tried = tryLimit(last, begin);
      least_sum = std::max(least_sum, tried.least_sum);
      // The plan found is the best one for all limits that it keeps.
      end = std::min<size_t>(last, std::lower_bound(t_maxes_.begin(), t_maxes_.end(), tried.slowest) - t_maxes_.begin());
    }
    const size_t middle = begin + (end - std::min(begin, end)) / 2;
    search(begin, middle, least_sum);
    search(middle, end, least_sum);
  }

  double relax(size_t index) {
    goOn();
    relaxed_.fill(t_maxes_[index]);
    return relaxed_.leastSum();
  }

  /// relax() was called for `index`. Plans whose slowest stage is below the limit `lowest` are no concern.
  Tried tryLimit(size_t index, size_t lowest) {
    const TimedMoves moves{moves_, t_maxes_[index]};
    Tried out{kNoTime, t_maxes_[index]};
    const auto seconds_of = [&](const StageMove& move, size_t num_stages) { return moves.seconds(move, num_stages); };
    if (is_stopped_ || !table_.fill(relaxed_.countsLeft(), seconds_of, std::plus<>(), [this] { return goOn(); })) {
      return out;
    }
    for (size_t num_stages = std::max<size_t>(limits_.least_stages, 1); num_stages <= mostStages(problem_); ++num_stages) {
      const double most_seconds = best_.size() < limits_.count ? kNoTime : best_.back().seconds;
      if (const double sum = table_.at(num_stages, 0, counts_.last()); sum + wait(t_maxes_[lowest]) < most_seconds) {
        const Tried found = tryPlans(moves, num_stages, lowest);
        out = found.least_sum < out.least_sum ? found : out;
      }
    }
    return out;
  }

  Tried tryPlans(const TimedMoves& moves, size_t num_stages, size_t lowest) {
    const TimedPlan first = leastSumPlan(table_, counts_, moves, problem_.num_layers, num_stages);
    if (offer(first)) {
      return {first.sum, first.slowest};
    }
    AcceptedPlanLimits limits;
    limits.most_sum = bestSeconds() - wait(t_maxes_[lowest]);
    limits.most_tries = goOn() ? tries_left_ / kShareOfTries : 0;
    limits.accepts = [this](const TimedPlan& plan) { return offer(plan); };
    const AcceptedPlan found = leastAcceptedPlan(table_, counts_, moves, num_stages, limits);
    tries_left_ -= std::min(tries_left_, found.num_tries);
    if (found.plan) {
      return {found.plan->sum, found.plan->slowest};
    }
    least_missed_ = std::min(least_missed_, found.least_sum + wait(t_maxes_[lowest]));
    return {found.least_sum, moves.t_max};
  }

  /// Keeps the plan if it is among the best. False where it is refused.
  bool offer(const TimedPlan& plan) {
    StagePlan offered{plan.stages, plan.sum + wait(plan.slowest), plan.slowest, false};
    if (limits_.accepts && !limits_.accepts(offered)) {
      return false;
    }
    const auto is_before = [](const StagePlan& a, const StagePlan& b) { return std::tie(a.seconds, a.stages) < std::tie(b.seconds, b.stages); };
    const auto place = std::lower_bound(best_.begin(), best_.end(), offered, is_before);
    if (place == best_.end() || place->stages != offered.stages) {
      best_.insert(place, std::move(offered));
      best_.resize(std::min(best_.size(), limits_.count));
    }
    return true;
  }

  bool goOn() {
    is_stopped_ = is_stopped_ || (limits_.go_on && !limits_.go_on());
    return !is_stopped_;
  }
  /// The second term of eq. 2.
  double wait(double slowest) const { return static_cast<double>(problem_.num_microbatches - 1) * slowest; }
  double bestSeconds() const { return best_.empty() ? kNoTime : best_.front().seconds; }

  const StageProblem& problem_;
  const StageSearchLimits& limits_;
  StageMoves moves_;
  DeviceCounts counts_;
  std::vector<double> t_maxes_;
  RelaxedTable relaxed_;
  StageTable<double> table_;
  std::vector<StagePlan> best_;    ///< best first
  double least_missed_ = kNoTime;  ///< no plan that was missed, among those that might be accepted, takes less
  size_t tries_left_;
  bool is_stopped_ = false;
};

}  // namespace

std::vector<StagePlan> bestStagePlans(const StageProblem& problem, const StageSearchLimits& limits) {
  checkStageProblem(problem);
  require(limits.count > 0, "the count of plans must be at least one");
  require(std::isfinite(limits.epsilon) && limits.epsilon >= 0, "epsilon must not be negative, but is " + std::to_string(limits.epsilon));
  return StageSearch(problem, limits).run();
}

}  // namespace xmesh::core
