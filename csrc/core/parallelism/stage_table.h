#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/parallelism/stage_search.h"

namespace xmesh::core {

/// Throws InvalidArgument, which names what is wrong with it.
void checkStageProblem(const StageProblem& problem);

/// The largest number of stages.
inline size_t mostStages(const StageProblem& problem) { return std::min(problem.num_layers, problem.in_flight.size()); }
/// The left side of eq. 5, for a stage with `num_stages` from it to the end.
inline int64_t bytesInUse(const StageProblem& problem, const StageOption& option, size_t num_stages) {
  return option.stage_bytes + problem.in_flight[num_stages - 1] * option.bytes_per_microbatch;
}

struct IndexRange {
  size_t begin = 0;
  size_t end = 0;
  bool isEmpty() const { return begin >= end; }
};

/// All numbers of devices, one per class, counted through: no devices are 0, all are last(). To add a submesh's devices is to add its offset.
class DeviceCounts {
 public:
  explicit DeviceCounts(const StageProblem& problem);

  size_t size() const { return size_; }
  size_t last() const { return size_ - 1; }
  size_t offset(size_t submesh) const { return offsets_[submesh]; }
  /// The counts that include a submesh's devices, in ascending order.
  const std::vector<IndexRange>& runs(size_t submesh) const { return runs_[submesh]; }
  bool include(size_t count, size_t submesh) const;

 private:
  size_t size_ = 1;
  std::vector<size_t> offsets_;
  std::vector<std::vector<IndexRange>> runs_;
};

/// A stage's layers and submesh, and which of the problem's options are worth having.
struct StageMove {
  size_t first_layer = 0;
  size_t end_layer = 0;
  size_t submesh = 0;
  size_t first_choice = 0;
  size_t end_choice = 0;
  double entering = 0;
};

/// An option that no other one beats in both.
struct MoveChoice {
  double seconds = 0;
  size_t most_stages = 0;  ///< from it to the end, with which it still fits
  size_t option = 0;
};

/// The moves of a problem, by the layer they start at, shortest first.
class StageMoves {
 public:
  /// `memory_bytes`, where given, takes the place of that of every submesh.
  explicit StageMoves(const StageProblem& problem, std::optional<int64_t> memory_bytes = std::nullopt);

  const std::vector<StageMove>& from(size_t layer) const { return moves_[layer]; }
  /// In ascending order of seconds.
  const std::vector<MoveChoice>& choices() const { return choices_; }
  /// The fastest choice that fits; null where none does.
  const MoveChoice* fastest(const StageMove& move, size_t num_stages) const {
    for (size_t choice = move.first_choice; choice < move.end_choice; ++choice) {
      if (choices_[choice].most_stages >= num_stages) {
        return &choices_[choice];
      }
    }
    return nullptr;
  }

 private:
  std::vector<std::vector<StageMove>> moves_;
  std::vector<MoveChoice> choices_;
};

/// Rows of values by device count. What is outside a row's range is `none`, the largest value.
template <typename Value>
class CountRows {
 public:
  CountRows(size_t num_rows, size_t row_size, Value none) : row_size_(row_size), none_(none), values_(num_rows * row_size, none), ranges_(num_rows) {}

  void clear() {
    for (size_t row = 0; row < ranges_.size(); ++row) {
      Value* const values = &values_[row * row_size_];
      std::fill(values + ranges_[row].begin, values + std::max(ranges_[row].begin, ranges_[row].end), none_);
      ranges_[row] = {};
    }
  }
  Value at(size_t row, size_t count) const { return values_[row * row_size_ + count]; }
  void set(size_t row, size_t count, Value value) {
    values_[row * row_size_ + count] = value;
    extend(row, {count, count + 1});
  }
  const IndexRange& range(size_t row) const { return ranges_[row]; }

  /// To the row `to`: what one more stage, on a submesh, makes of the row `from`, within `wanted`.
  template <typename Join>
  void join(size_t to, size_t from, Value cost, size_t offset, const std::vector<IndexRange>& runs, const IndexRange& wanted, Join join) {
    for (const IndexRange& run : runs) {
      const size_t begin = std::max({run.begin, ranges_[from].begin + offset, wanted.begin});
      const size_t end = std::min({run.end, ranges_[from].end + offset, wanted.end});
      if (begin >= end) {
        continue;
      }
      Value* const target = &values_[to * row_size_ + begin];
      const Value* const source = &values_[from * row_size_ + begin - offset];
      for (size_t index = 0; index < end - begin; ++index) {
        const Value value = join(cost, source[index]);
        target[index] = value < target[index] ? value : target[index];
      }
      extend(to, {begin, end});
    }
  }
  /// Once a row is complete: takes `none` from both ends of its range.
  void trim(size_t row) {
    IndexRange& range = ranges_[row];
    while (range.begin < range.end && at(row, range.begin) == none_) {
      ++range.begin;
    }
    while (range.begin < range.end && at(row, range.end - 1) == none_) {
      --range.end;
    }
  }

 private:
  void extend(size_t row, const IndexRange& added) {
    IndexRange& range = ranges_[row];
    range = range.isEmpty() ? added : IndexRange{std::min(range.begin, added.begin), std::max(range.end, added.end)};
  }

  size_t row_size_;
  Value none_;
  std::vector<Value> values_;
  std::vector<IndexRange> ranges_;
};

/// F of eq. 3, with a cost that is joined to it: the sum of seconds, or the largest of bytes.
template <typename Value>
class StageTable {
 public:
  StageTable(const StageProblem& problem, const StageMoves& moves, const DeviceCounts& counts, Value none)
      : moves_(moves),
        counts_(counts),
        num_layers_(problem.num_layers),
        most_stages_(mostStages(problem)),
        none_(none),
        rows_((most_stages_ + 1) * (num_layers_ + 1), counts.size(), none) {}

  /// `num_stages` stages, from `layer` to the last, use `count` devices.
  Value at(size_t num_stages, size_t layer, size_t count) const { return rows_.at(row(num_stages, layer), count); }
  Value none() const { return none_; }

  /// `cost_of(move, num_stages)` is none() for what may not be; `wanted[layer]` are the counts that matter there. False once `go_on()` was.
  template <typename CostOf, typename Join, typename GoOn>
  bool fill(const std::vector<IndexRange>& wanted, CostOf cost_of, Join join, GoOn go_on) {
    rows_.clear();
    rows_.set(row(0, num_layers_), 0, Value{0});
    for (size_t num_stages = 1; num_stages <= most_stages_; ++num_stages) {
      if (!go_on()) {
        return false;
      }
      for (size_t layer = 0; layer + num_stages <= num_layers_; ++layer) {
        const size_t to = row(num_stages, layer);
        for (const StageMove& move : moves_.from(layer)) {
          const size_t from = row(num_stages - 1, move.end_layer);
          if (rows_.range(from).isEmpty()) {
            continue;
          }
          if (const Value cost = cost_of(move, num_stages); cost != none_) {
            rows_.join(to, from, cost, counts_.offset(move.submesh), counts_.runs(move.submesh), wanted[layer], join);
          }
        }
        rows_.trim(to);
      }
    }
    return true;
  }

 private:
  size_t row(size_t num_stages, size_t layer) const { return num_stages * (num_layers_ + 1) + layer; }

  const StageMoves& moves_;
  const DeviceCounts& counts_;
  size_t num_layers_;
  size_t most_stages_;
  Value none_;
  CountRows<Value> rows_;
};

}  // namespace xmesh::core
