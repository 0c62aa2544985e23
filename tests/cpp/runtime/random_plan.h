#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "core/resharding/decompose.h"
#include "core/resharding/plan.h"
#include "random_layouts.h"

namespace xmesh::replay {

using layouts::randomInt;
using layouts::shuffleRanks;

/// A valid plan that no sane strategy would make: random chunk borders that differ from hop to hop, random relays among needers,
/// contributions reduced at random ranks in random order and forwarded from there, tasks interleaved at random.
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
      per_task.push_back(messagesOf(static_cast<int64_t>(task)));
    }
    std::vector<size_t> next(per_task.size(), 0);
    std::vector<size_t> open;
    for (size_t task = 0; task < per_task.size(); ++task) {
      open.push_back(task);
    }
    while (!open.empty()) {
      const auto pick = static_cast<size_t>(randomInt(rng_, 0, static_cast<int64_t>(open.size()) - 1));
      const size_t task = open[pick];
      if (next[task] == per_task[task].size()) {
        open[pick] = open.back();
        open.pop_back();
      } else {
        plan_.messages.push_back(per_task[task][next[task]++]);
      }
    }
    return std::move(plan_);
  }

 private:
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
