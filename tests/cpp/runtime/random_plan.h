#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "core/resharding/decompose.h"
#include "core/resharding/plan.h"
#include "random_layouts.h"

namespace xmesh::replay {

using layouts::randomInt;
using layouts::shuffleRanks;

/// A valid plan that no sane strategy would make: random chunk borders that differ from hop to hop, random relays among needers,
/// contributions reduced at random ranks in random order and forwarded from there, or on the way there by random trees of partial sums,
/// tasks interleaved at random.
class RandomPlanner {
 public:
  RandomPlanner(std::vector<core::TensorPair> tensors, core::Topology topology, std::mt19937_64& rng) : rng_(rng) {
    plan_.strategy = "random";
    plan_.tensors = std::move(tensors);
    plan_.topology = std::move(topology);
    core::decompose(plan_);
  }

  core::ReshardingPlan plan() {
    std::vector<std::vector<core::Message>> per_task;
    for (size_t task = 0; task < plan_.tasks.size(); ++task) {
      const auto index = static_cast<int64_t>(task);
      per_task.push_back(numContributions(index) > 1 && randomInt(rng_, 0, 1) == 0 ? messagesWithSums(index) : messagesOf(index));
    }
    plan_.messages = interleaved(per_task);
    return std::move(plan_);
  }

 private:
  size_t numContributions(int64_t task) const {
    return plan_.holders[static_cast<size_t>(plan_.tasks[static_cast<size_t>(task)].holders)].contributions.size();
  }

  /// Lists merged at random.
  std::vector<core::Message> interleaved(const std::vector<std::vector<core::Message>>& lists) {
    std::vector<core::Message> out;
    std::vector<size_t> next(lists.size(), 0);
    std::vector<size_t> open;
    for (size_t list = 0; list < lists.size(); ++list) {
      open.push_back(list);
    }
    while (!open.empty()) {
      const auto pick = static_cast<size_t>(randomInt(rng_, 0, static_cast<int64_t>(open.size()) - 1));
      const size_t list = open[pick];
      if (next[list] == lists[list].size()) {
        open[pick] = open.back();
        open.pop_back();
      } else {
        out.push_back(lists[list][next[list]++]);
      }
    }
    return out;
  }

  std::vector<core::Interval> randomCuts(core::Interval whole) {
    std::vector<core::Interval> out;
    while (whole.begin < whole.end) {
      const int64_t end = randomInt(rng_, 0, 2) == 0 ? whole.end : randomInt(rng_, whole.begin + 1, whole.end);
      out.push_back({whole.begin, end});
      whole.begin = end;
    }
    return out;
  }

  core::Message message(int64_t task, core::Interval range, int64_t src, int64_t dst) const {
    core::Message out;
    out.task = task;
    out.begin = range.begin;
    out.end = range.end;
    out.src_rank = static_cast<int32_t>(src);
    out.dst_rank = static_cast<int32_t>(dst);
    return out;
  }

  std::vector<core::Message> messagesOf(int64_t task) {
    const core::UnitTask& unit = plan_.tasks[static_cast<size_t>(task)];
    const auto& contributions = plan_.holders[static_cast<size_t>(unit.holders)].contributions;
    const core::Interval whole{0, core::numElements(unit.box)};
    std::vector<int64_t> needers = plan_.needers[static_cast<size_t>(unit.needers)];
    shuffleRanks(rng_, needers);
    std::vector<core::Message> out;
    std::vector<std::pair<int64_t, core::Interval>> have;  // who has which range by now
    if (contributions.size() == 1) {
      for (int64_t rank : contributions[0]) {
        have.emplace_back(rank, whole);
        std::erase(needers, rank);
      }
    }
    for (int64_t rank : needers) {
      for (const core::Interval& range : randomCuts(whole)) {
        const bool is_reduced = contributions.size() > 1 && (have.empty() || randomInt(rng_, 0, 2) == 0);
        if (!(is_reduced ? false : addValue(task, range, rank, have, out))) {
          if (contributions.size() == 1) {
            addWholeFromHolder(task, range, rank, contributions[0], out);
          } else {
            addContributions(task, range, rank, contributions, out);
          }
        }
        have.emplace_back(rank, range);
      }
    }
    return out;
  }

  /// Range by range: a tree of sums to a random needer, the value from there to the others.
  std::vector<core::Message> messagesWithSums(int64_t task) {
    const core::UnitTask& unit = plan_.tasks[static_cast<size_t>(task)];
    std::vector<int64_t> needers = plan_.needers[static_cast<size_t>(unit.needers)];
    std::vector<std::vector<core::Message>> per_range;
    for (const core::Interval& whole : randomCuts({0, core::numElements(unit.box)})) {
      shuffleRanks(rng_, needers);
      std::vector<core::Message>& out = per_range.emplace_back();
      addTree(task, whole, needers, out);
      std::vector<std::pair<int64_t, core::Interval>> have = {{needers.front(), whole}};
      for (size_t i = 1; i < needers.size(); ++i) {
        for (const core::Interval& range : randomCuts(whole)) {
          addValue(task, range, needers[i], have, out);
        }
        have.emplace_back(needers[i], whole);
      }
    }
    return interleaved(per_range);
  }

  /// The first needer reduces; every other rank on the way sends to it or to one that comes later.
  void addTree(int64_t task, core::Interval whole, const std::vector<int64_t>& needers, std::vector<core::Message>& out) {
    const auto& contributions = plan_.holders[static_cast<size_t>(plan_.tasks[static_cast<size_t>(task)].holders)].contributions;
    const auto isAmong = [](const std::vector<int64_t>& ranks, int64_t rank) { return std::find(ranks.begin(), ranks.end(), rank) != ranks.end(); };
    std::vector<int64_t> way;
    std::map<int64_t, int32_t> contribution_of;
    for (size_t c = 0; c < contributions.size(); ++c) {
      if (!isAmong(contributions[c], needers.front())) {
        way.push_back(contributions[c][static_cast<size_t>(randomInt(rng_, 0, static_cast<int64_t>(contributions[c].size()) - 1))]);
        contribution_of[way.back()] = static_cast<int32_t>(c);
      }
    }
    for (size_t i = 1; i < needers.size(); ++i) {
      const bool holds_one = std::any_of(contributions.begin(), contributions.end(), [&](const auto& ranks) { return isAmong(ranks, needers[i]); });
      if (!holds_one && randomInt(rng_, 0, 2) == 0) {
        way.push_back(needers[i]);
      }
    }
    shuffleRanks(rng_, way);
    way.push_back(needers.front());
    std::vector<bool> has_received(way.size(), false);
    for (size_t i = 0; i + 1 < way.size(); ++i) {
      if (!has_received[i] && !contribution_of.contains(way[i])) {
        continue;
      }
      const auto to = static_cast<size_t>(randomInt(rng_, static_cast<int64_t>(i) + 1, static_cast<int64_t>(way.size()) - 1));
      has_received[to] = true;
      for (const core::Interval& part : randomCuts(whole)) {
        out.push_back(message(task, part, way[i], way[to]));
        out.back().payload = has_received[i] ? core::Payload::kPartialSum : core::Payload::kContribution;
        out.back().contribution = has_received[i] ? 0 : contribution_of.at(way[i]);
      }
    }
  }

  bool addValue(int64_t task, core::Interval range, int64_t rank, const std::vector<std::pair<int64_t, core::Interval>>& have,
                std::vector<core::Message>& out) {
    std::vector<int64_t> able;
    for (const auto& [owner, owned] : have) {
      if (owner != rank && owned.begin <= range.begin && range.end <= owned.end) {
        able.push_back(owner);
      }
    }
    if (able.empty()) {
      return false;
    }
    out.push_back(message(task, range, able[static_cast<size_t>(randomInt(rng_, 0, static_cast<int64_t>(able.size()) - 1))], rank));
    return true;
  }

  void addWholeFromHolder(int64_t task, core::Interval range, int64_t rank, const std::vector<int64_t>& holders, std::vector<core::Message>& out) {
    out.push_back(message(task, range, holders[static_cast<size_t>(randomInt(rng_, 0, static_cast<int64_t>(holders.size()) - 1))], rank));
  }

  void addContributions(int64_t task, core::Interval range, int64_t rank, const std::vector<std::vector<int64_t>>& contributions,
                        std::vector<core::Message>& out) {
    std::vector<core::Message> added;
    for (size_t c = 0; c < contributions.size(); ++c) {
      const std::vector<int64_t>& holders = contributions[c];
      if (std::find(holders.begin(), holders.end(), rank) != holders.end()) {
        continue;
      }
      for (const core::Interval& part : randomCuts(range)) {
        added.push_back(message(task, part, holders[static_cast<size_t>(randomInt(rng_, 0, static_cast<int64_t>(holders.size()) - 1))], rank));
        added.back().payload = core::Payload::kContribution;
        added.back().contribution = static_cast<int32_t>(c);
      }
    }
    for (size_t i = added.size(); i > 1; --i) {
      std::swap(added[i - 1], added[static_cast<size_t>(randomInt(rng_, 0, static_cast<int64_t>(i) - 1))]);
    }
    out.insert(out.end(), added.begin(), added.end());
  }

  std::mt19937_64& rng_;
  core::ReshardingPlan plan_;
};

/// Gives random pairs a dtype out of all that the placements allow.
inline void drawDType(std::mt19937_64& rng, core::TensorPair& pair) {
  constexpr const char* kNames[] = {"float32", "float64", "float16", "bfloat16",   "int8", "uint8",     "int16",      "uint16",        "int32",
                                    "uint32",  "int64",   "uint64",  "complex128", "bool", "complex64", "complex128", "float8_e4m3fn", "complex32"};
  for (int attempt = 0; attempt < 20; ++attempt) {
    pair.src.dtype = core::DType::parse(kNames[randomInt(rng, 0, 17)]);
    pair.dst.dtype = pair.src.dtype;
    try {
      pair.src.validate();
      return;
    } catch (const std::invalid_argument&) {
    }
  }
  pair.src.dtype = core::DType::parse("float32");
  pair.dst.dtype = pair.src.dtype;
}

}  // namespace xmesh::replay
