#include <algorithm>
#include <limits>

#include "core/parallelism/stage_search.h"
#include "core/parallelism/stage_table.h"

namespace xmesh::core {
namespace {

constexpr int64_t kNoBytes = std::numeric_limits<int64_t>::max();

/// The option that needs least memory.
size_t smallestOption(const StageProblem& problem, const StageMove& move, size_t num_stages) {
  const std::vector<StageOption>& options = problem.optionsOf(move.first_layer, move.end_layer - 1, move.submesh);
  const auto found = std::min_element(options.begin(), options.end(), [&](const StageOption& a, const StageOption& b) {
    return bytesInUse(problem, a, num_stages) < bytesInUse(problem, b, num_stages);
  });
  return static_cast<size_t>(found - options.begin());
}

int64_t leastBytes(const StageProblem& problem, const StageMove& move, size_t num_stages) {
  const std::vector<StageOption>& options = problem.optionsOf(move.first_layer, move.end_layer - 1, move.submesh);
  return bytesInUse(problem, options[smallestOption(problem, move, num_stages)], num_stages);
}

/// The stages of a plan that needs no more than `need.num_bytes`.
void addStages(const StageProblem& problem, const StageMoves& moves, const DeviceCounts& counts, const StageTable<int64_t>& table, size_t num_stages,
               MemoryNeed& need) {
  size_t count = counts.last();
  need.largest_stage = num_stages;
  for (size_t layer = 0; layer < problem.num_layers; --num_stages) {
    const std::vector<StageMove>& from = moves.from(layer);
    const auto found = std::find_if(from.begin(), from.end(), [&](const StageMove& move) {
      return counts.include(count, move.submesh) && table.at(num_stages - 1, move.end_layer, count - counts.offset(move.submesh)) <= need.num_bytes &&
             leastBytes(problem, move, num_stages) <= need.num_bytes;
    });
    if (leastBytes(problem, *found, num_stages) == need.num_bytes) {
      need.largest_stage = std::min(need.largest_stage, need.stages.size());
    }
    need.stages.push_back({layer, found->end_layer, found->submesh, smallestOption(problem, *found, num_stages)});
    layer = found->end_layer;
    count -= counts.offset(found->submesh);
  }
}

}  // namespace

std::optional<MemoryNeed> smallestMemory(const StageProblem& problem) {
  checkStageProblem(problem);
  const StageMoves moves(problem, kNoBytes);
  const DeviceCounts counts(problem);
  StageTable<int64_t> table(problem, moves, counts, kNoBytes);
  table.fill(
      std::vector<IndexRange>(problem.num_layers, {0, counts.size()}),
      [&](const StageMove& move, size_t num_stages) { return leastBytes(problem, move, num_stages); },
      [](int64_t bytes, int64_t rest) { return std::max(bytes, rest); }, [] { return true; });
  MemoryNeed out{kNoBytes, {}, 0};
  size_t best_stages = 0;
  for (size_t num_stages = 1; num_stages <= mostStages(problem); ++num_stages) {
    if (const int64_t num_bytes = table.at(num_stages, 0, counts.last()); num_bytes < out.num_bytes) {
      out.num_bytes = num_bytes;
      best_stages = num_stages;
    }
  }
  if (best_stages == 0) {
    return std::nullopt;
  }
  addStages(problem, moves, counts, table, best_stages, out);
  return out;
}

}  // namespace xmesh::core
