#include "core/resharding/validate.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "core/error.h"

namespace xmesh::core {
namespace {

/// Elements as disjoint ascending ranges.
class RangeSet {
 public:
  void add(Interval range) {
    auto next = ranges_.lower_bound(range.begin);
    if (next != ranges_.begin() && std::prev(next)->second >= range.begin) {
      --next;
      range.begin = next->first;
      range.end = std::max(range.end, next->second);
      next = ranges_.erase(next);
    }
    while (next != ranges_.end() && next->first <= range.end) {
      range.end = std::max(range.end, next->second);
      next = ranges_.erase(next);
    }
    ranges_[range.begin] = range.end;
  }
  bool meets(Interval range) const {
    const auto next = ranges_.lower_bound(range.end);
    return next != ranges_.begin() && std::prev(next)->second > range.begin;
  }
  /// The parts of `range` that are in the set.
  std::vector<Interval> within(Interval range) const {
    std::vector<Interval> out;
    auto it = ranges_.upper_bound(range.begin);
    it = it != ranges_.begin() ? std::prev(it) : it;
    for (; it != ranges_.end() && it->first < range.end; ++it) {
      const Interval part{std::max(range.begin, it->first), std::min(range.end, it->second)};
      if (part.begin < part.end) {
        out.push_back(part);
      }
    }
    return out;
  }
  /// The parts of `range` that are not in the set.
  std::vector<Interval> gaps(Interval range) const {
    std::vector<Interval> out;
    auto it = ranges_.upper_bound(range.begin);
    int64_t from = it != ranges_.begin() ? std::max(range.begin, std::prev(it)->second) : range.begin;
    for (; it != ranges_.end() && it->first < range.end; ++it) {
      if (from < it->first) {
        out.push_back({from, it->first});
      }
      from = std::max(from, it->second);
    }
    if (from < range.end) {
      out.push_back({from, range.end});
    }
    return out;
  }

 private:
  std::map<int64_t, int64_t> ranges_;
};

/// What one rank has of one task.
struct Stock {
  RangeSet value;
  std::vector<RangeSet> contributions;  ///< alone or in sums
  RangeSet received;                    ///< contributions and sums that have come
  RangeSet given;                       ///< sent on as part of a sum: of no use here any more
};

class Replay {
 public:
  explicit Replay(const ReshardingPlan& plan) : plan_(plan) {
    for (int64_t rank : plan.participants()) {
      participants_.insert(rank);
    }
  }

  void run() {
    for (size_t i = 0; i < plan_.messages.size(); ++i) {
      checkRanges(i);
      play(i);
    }
    for (size_t task = 0; task < plan_.tasks.size(); ++task) {
      checkComplete(task);
    }
    for (const auto& [task_and_rank, stock] : stocks_) {
      checkUsed(task_and_rank.first, task_and_rank.second, stock);
    }
  }

 private:
  const std::vector<std::vector<int64_t>>& contributionsOf(int64_t task) const {
    return plan_.holders[static_cast<size_t>(plan_.tasks[static_cast<size_t>(task)].holders)].contributions;
  }
  const std::vector<int64_t>& neederRanks(int64_t task) const {
    return plan_.needers[static_cast<size_t>(plan_.tasks[static_cast<size_t>(task)].needers)];
  }
  static bool has(const std::vector<int64_t>& ranks, int64_t rank) { return std::binary_search(ranks.begin(), ranks.end(), rank); }

  /// A rank's stock; it begins with the contribution that the rank holds.
  Stock& stockOf(int64_t task, int64_t rank) {
    const auto [entry, is_new] = stocks_.try_emplace({task, rank});
    if (is_new) {
      const std::vector<std::vector<int64_t>>& contributions = contributionsOf(task);
      entry->second.contributions.resize(contributions.size());
      for (size_t i = 0; i < contributions.size(); ++i) {
        if (has(contributions[i], rank)) {
          entry->second.contributions[i].add({0, numElements(plan_.tasks[static_cast<size_t>(task)].box)});
        }
      }
    }
    return entry->second;
  }

  /// The first range that the rank can neither copy nor reduce, or an empty one.
  static Interval firstMissing(const Stock& stock, Interval range) {
    for (const Interval& gap : stock.value.gaps(range)) {
      const std::vector<Interval> given = stock.given.within(gap);
      if (!given.empty()) {
        return given.front();
      }
      for (const RangeSet& contribution : stock.contributions) {
        const std::vector<Interval> missing = contribution.gaps(gap);
        if (!missing.empty()) {
          return missing.front();
        }
      }
    }
    return {};
  }

  void checkRanges(size_t index) const {
    const Message& message = plan_.messages[index];
    const std::string what = "plan message " + std::to_string(index) + ": ";
    require(message.task >= 0 && std::cmp_less(message.task, plan_.tasks.size()), what + "there is no task " + std::to_string(message.task));
    const int64_t num_elements = numElements(plan_.tasks[static_cast<size_t>(message.task)].box);
    require(message.begin >= 0 && message.begin < message.end && message.end <= num_elements,
            what + "elements [" + std::to_string(message.begin) + ", " + std::to_string(message.end) + ") are not a part of the task's " +
                std::to_string(num_elements));
    require(message.src_rank != message.dst_rank, what + "rank " + std::to_string(message.src_rank) + " sends to itself");
    require(participants_.contains(message.src_rank) && participants_.contains(message.dst_rank),
            what + "rank " + std::to_string(participants_.contains(message.src_rank) ? message.dst_rank : message.src_rank) + " is in no mesh");
    require(message.contribution >= 0 && std::cmp_less(message.contribution, contributionsOf(message.task).size()),
            what + "there is no contribution " + std::to_string(message.contribution));
  }

  void play(size_t index) {
    const Message& message = plan_.messages[index];
    const std::vector<std::vector<int64_t>>& contributions = contributionsOf(message.task);
    const bool is_value = message.payload == Payload::kValue;
    const auto holds_one = [&] {
      return std::any_of(contributions.begin(), contributions.end(), [&](const auto& c) { return has(c, message.dst_rank); });
    };
    if (!has(neederRanks(message.task), message.dst_rank) && (is_value || !holds_one())) {
      fail(index, "rank " + std::to_string(message.dst_rank) + " receives what it does not need");
    }
    if (!is_value && contributions.size() == 1) {
      fail(index, "the slice is not Partial, its value travels as such");
    }
    Stock& from = stockOf(message.task, message.src_rank);
    Stock& to = stockOf(message.task, message.dst_rank);
    const Interval range{message.begin, message.end};
    if (to.value.meets(range) || (contributions.size() == 1 && has(contributions.front(), message.dst_rank))) {
      failAsHad(index, range);
    }
    if (is_value) {
      playValue(index, from, to);
      return;
    }
    checkNotGiven(index, message.src_rank, from);
    checkNotGiven(index, message.dst_rank, to);
    if (message.payload == Payload::kContribution) {
      playContribution(index, to);
    } else {
      playSum(index, from, to);
    }
    to.received.add(range);
  }

  void playValue(size_t index, Stock& from, Stock& to) {
    const Message& message = plan_.messages[index];
    const Interval range{message.begin, message.end};
    const bool is_partial = to.contributions.size() > 1;
    const Interval missing = firstMissing(from, range);
    if (missing.size() > 0) {
      fail(index, "rank " + std::to_string(message.src_rank) + " sends elements " + rangeStr(missing) + " before it has them");
    }
    if (is_partial && !has(neederRanks(message.task), message.src_rank)) {
      fail(index, "rank " + std::to_string(message.src_rank) + " reduces what it does not need");
    }
    for (const Interval& received : to.received.within(range)) {
      if (!to.given.gaps(received).empty()) {
        fail(index, "rank " + std::to_string(message.dst_rank) + " reduces elements of " + rangeStr(range) + " and receives them too");
      }
    }
    if (is_partial) {
      from.value.add(range);
    }
    to.value.add(range);
  }

  void playContribution(size_t index, Stock& to) {
    const Message& message = plan_.messages[index];
    const auto contribution = static_cast<size_t>(message.contribution);
    if (!has(contributionsOf(message.task)[contribution], message.src_rank)) {
      fail(index, "rank " + std::to_string(message.src_rank) + " does not hold contribution " + std::to_string(message.contribution));
    }
    if (to.contributions[contribution].meets({message.begin, message.end})) {
      failAsHad(index, {message.begin, message.end});
    }
    to.contributions[contribution].add({message.begin, message.end});
  }

  void playSum(size_t index, Stock& from, Stock& to) {
    const Message& message = plan_.messages[index];
    const Interval range{message.begin, message.end};
    if (from.value.meets(range)) {
      fail(index, "rank " + std::to_string(message.src_rank) + " has the value of elements of " + rangeStr(range) + " and sends a sum");
    }
    const std::vector<Interval> lacking = from.received.gaps(range);
    if (!lacking.empty()) {
      fail(index, "rank " + std::to_string(message.src_rank) + " sends a sum of elements " + rangeStr(lacking.front()) + " before it received any");
    }
    for (size_t i = 0; i < from.contributions.size(); ++i) {
      for (const Interval& part : from.contributions[i].within(range)) {
        if (to.contributions[i].meets(part)) {
          fail(index,
               "rank " + std::to_string(message.dst_rank) + " has contribution " + std::to_string(i) + " to elements " + rangeStr(part) + " already");
        }
        to.contributions[i].add(part);
      }
    }
    from.given.add(range);
  }

  void checkNotGiven(size_t index, int64_t rank, const Stock& stock) const {
    const Message& message = plan_.messages[index];
    const std::vector<Interval> given = stock.given.within({message.begin, message.end});
    if (!given.empty()) {
      fail(index, "rank " + std::to_string(rank) + " has given its sum of elements " + rangeStr(given.front()) + " away");
    }
  }

  [[noreturn]] void failAsHad(size_t index, Interval range) const {
    fail(index, "rank " + std::to_string(plan_.messages[index].dst_rank) + " has elements " + rangeStr(range) + " already");
  }

  void checkComplete(size_t task) {
    const auto index = static_cast<int64_t>(task);
    for (int64_t rank : neederRanks(index)) {
      const Interval missing = firstMissing(stockOf(index, rank), {0, numElements(plan_.tasks[task].box)});
      if (missing.size() > 0) {
        failAtEnd(index, "rank " + std::to_string(rank) + " ends without elements " + rangeStr(missing));
      }
    }
  }

  /// What a rank receives and does not need, it must pass on.
  void checkUsed(int64_t task, int64_t rank, const Stock& stock) const {
    const Interval whole{0, numElements(plan_.tasks[static_cast<size_t>(task)].box)};
    for (const Interval& received : has(neederRanks(task), rank) ? std::vector<Interval>{} : stock.received.within(whole)) {
      const std::vector<Interval> kept = stock.given.gaps(received);
      if (!kept.empty()) {
        failAtEnd(task, "rank " + std::to_string(rank) + " keeps contributions to elements " + rangeStr(kept.front()) + " that it does not need");
      }
    }
  }

  [[noreturn]] void fail(size_t bad, const std::string& why) const { failOf(plan_.messages[bad].task, bad, why); }
  [[noreturn]] void failAtEnd(int64_t task, const std::string& why) const { failOf(task, plan_.messages.size(), why); }

  static std::string rangeStr(Interval range) { return "[" + std::to_string(range.begin) + ", " + std::to_string(range.end) + ")"; }

  /// The task's messages up to `bad`, the last dozen of them, the bad one marked.
  [[noreturn]] void failOf(int64_t task, size_t bad, const std::string& why) const {
    constexpr size_t kShown = 12;
    std::vector<std::string> lines;
    for (size_t i = 0; i < plan_.messages.size() && i <= bad; ++i) {
      const Message& message = plan_.messages[i];
      if (message.task != task) {
        continue;
      }
      lines.push_back((i == bad ? "> " : "  ") + std::to_string(i) + "  " + rangeStr({message.begin, message.end}) + "  " +
                      std::to_string(message.src_rank) + " -> " + std::to_string(message.dst_rank) + "  " + payloadStr(message));
    }
    std::string grid;
    for (size_t i = lines.size() > kShown ? lines.size() - kShown : 0; i < lines.size(); ++i) {
      grid += "\n" + lines[i];
    }
    const UnitTask& unit = plan_.tasks[static_cast<size_t>(task)];
    throw InvalidArgument("invalid plan (" + plan_.strategy + "): tensor " + std::to_string(unit.tensor) + ", task " + std::to_string(task) + " " +
                          boxStr(unit.box) + ": " + why + "\n  message  elements  from -> to  payload" + grid +
                          (bad == plan_.messages.size() ? "\n> end of the plan" : ""));
  }

  const ReshardingPlan& plan_;
  std::set<int64_t> participants_;
  std::map<std::pair<int64_t, int64_t>, Stock> stocks_;
};

}  // namespace

void validatePlan(const ReshardingPlan& plan) { Replay(plan).run(); }

}  // namespace xmesh::core
