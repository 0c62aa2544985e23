#include "core/parallelism/operator_clustering.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "core/error.h"

namespace xmesh::core {
namespace {

constexpr int64_t kLargestSum = int64_t{1} << 62;
/// Squares of FLOPs, exactly: (2^62)^2 twice fits.
using Squares = unsigned __int128;
constexpr Squares kNoSquares = ~Squares{0};

int64_t checkedSum(int64_t sum, int64_t next, const std::string& what) {
  require(next >= 0, what + " must not be negative, but is " + std::to_string(next));
  require(next < kLargestSum - sum, what + " and all before it add up to 2^62 or more");
  return sum + next;
}

/// The next operator that reads a value changes, as a layer's start goes past an operator.
struct ReaderChange {
  size_t old_reader = 0;
  size_t new_reader = 0;
  int64_t num_bytes = 0;
};

/// Bytes by the operator that reads them next, and their sums (a binary indexed tree).
class BytesByReader {
 public:
  explicit BytesByReader(size_t num_operators) : sums_(num_operators + 1, 0) {}
  void add(size_t reader, int64_t num_bytes) {
    for (size_t place = reader + 1; place < sums_.size(); place += place & (~place + 1)) {
      sums_[place] += num_bytes;
    }
  }
  /// How many operators, from the first on, have at most `limit` bytes together.
  size_t numWithin(int64_t limit) const {
    size_t place = 0;
    for (size_t step = std::bit_floor(sums_.size() - 1); step > 0; step /= 2) {
      if (place + step < sums_.size() && sums_[place + step] <= limit) {
        place += step;
        limit -= sums_[place];
      }
    }
    return place;
  }

 private:
  std::vector<int64_t> sums_;
};

/// The model, as cuts see it. Layers are [start, end) in operators.
class CutModel {
 public:
  CutModel(const std::vector<ModelOperator>& operators, const std::vector<ModelValue>& values) : changes_(operators.size()) {
    flops_before_.push_back(0);
    for (size_t op = 0; op < operators.size(); ++op) {
      flops_before_.push_back(checkedSum(flops_before_.back(), operators[op].num_flops, "FLOPs of operator " + std::to_string(op)));
    }
    for (size_t value = 0; value < values.size(); ++value) {
      total_bytes_ = checkedSum(total_bytes_, values[value].num_bytes, "bytes of value " + std::to_string(value));
      require(!values[value].maker || *values[value].maker < operators.size(), "value " + std::to_string(value) + " is made by no operator");
    }
    addReads(operators, values);
  }

  size_t numOperators() const { return changes_.size(); }
  int64_t totalBytes() const { return total_bytes_; }
  const std::vector<int64_t>& flopsBefore() const { return flops_before_; }

  /// By start: the last end of a layer within both limits; the start itself where there is none.
  std::vector<size_t> lastEnds(int64_t byte_limit, int64_t flop_limit) const {
    std::vector<size_t> out(numOperators());
    BytesByReader received(numOperators());
    size_t flop_end = 0;
    for (size_t start = 0; start < numOperators(); ++start) {
      while (flop_end < numOperators() && flops_before_[flop_end + 1] - flops_before_[start] <= flop_limit) {
        ++flop_end;
      }
      out[start] = std::max(start, std::min(flop_end, received.numWithin(byte_limit)));
      for (const ReaderChange& change : changes_[start]) {
        if (change.old_reader != kNoReader) {
          received.add(change.old_reader, -change.num_bytes);
        }
        if (change.new_reader != kNoReader) {
          received.add(change.new_reader, change.num_bytes);
        }
      }
    }
    return out;
  }

 private:
  static constexpr size_t kNoReader = std::numeric_limits<size_t>::max();

  void addReads(const std::vector<ModelOperator>& operators, const std::vector<ModelValue>& values) {
    std::vector<size_t> next_reader(values.size(), kNoReader);
    for (size_t op = operators.size(); op-- > 0;) {
      for (const size_t value : operators[op].reads) {
        require(value < values.size(),
                "operator " + std::to_string(op) + " reads value " + std::to_string(value) + " of " + std::to_string(values.size()) + " values");
        if (!values[value].maker || next_reader[value] == op) {
          continue;
        }
        require(*values[value].maker < op, "operator " + std::to_string(op) + " reads value " + std::to_string(value) + ", which operator " +
                                               std::to_string(*values[value].maker) + " makes: no earlier one");
        changes_[op].push_back({op, next_reader[value], values[value].num_bytes});
        next_reader[value] = op;
      }
    }
    for (size_t value = 0; value < values.size(); ++value) {
      if (values[value].maker && next_reader[value] != kNoReader) {
        changes_[*values[value].maker].push_back({kNoReader, next_reader[value], values[value].num_bytes});
      }
    }
  }

  std::vector<int64_t> flops_before_;
  int64_t total_bytes_ = 0;
  std::vector<std::vector<ReaderChange>> changes_;  ///< as the start goes past the operator
};

/// Whether all operators can be cut into `num_layers` layers that end no later than `last_ends`. The numbers of layers that can be are all between
/// the fewest and the most: of two starts next to each other from which the end can be reached, the first leads to the second.
bool canCut(const std::vector<size_t>& last_ends, size_t num_layers) {
  const size_t num_operators = last_ends.size();
  size_t most = 0;
  size_t next_start = num_operators;  // from which the end can be reached
  for (size_t start = num_operators; start-- > 0;) {
    if (last_ends[start] >= next_start) {
      next_start = start;
      ++most;
    }
  }
  size_t fewest = 0;
  for (size_t start = 0, reached = 0, next_reached = 0; reached < num_operators; reached = next_reached, ++fewest) {
    for (; start <= reached; ++start) {
      next_reached = std::max(next_reached, last_ends[start]);
    }
    if (next_reached == reached) {
      return false;
    }
  }
  return next_start == 0 && fewest <= num_layers && num_layers <= most;
}

/// The least number from `least` to `most` of which `holds` is true: of all after it too, and of `most`.
template <typename Holds>
int64_t leastThat(int64_t least, int64_t most, Holds holds) {
  while (least < most) {
    const int64_t middle = least + (most - least) / 2;
    if (holds(middle)) {
      most = middle;
    } else {
      least = middle + 1;
    }
  }
  return least;
}

/// For each end, the start that is cheapest for the layer before it: cost_of[start] + (FLOPs of the layer)^2. Two starts' costs differ by a linear
/// function of the end's FLOPs, so one passes the other once at most, and a tree over the ends keeps the cheapest (Li and Chao's).
class CheapestStarts {
 public:
  CheapestStarts(const std::vector<int64_t>& flops_before, const std::vector<Squares>& cost_of)
      : flops_before_(flops_before), cost_of_(cost_of), num_leaves_(std::bit_ceil(flops_before.size())), starts_(2 * num_leaves_, kNone) {}

  /// Lets layers start at `start` and end at `first_end` to `last_end`.
  void add(size_t start, size_t first_end, size_t last_end) {
    size_t low = first_end + num_leaves_;
    size_t high = last_end + num_leaves_ + 1;
    for (size_t width = 1; low < high; low /= 2, high /= 2, width *= 2) {
      if (low % 2 == 1) {
        addBelow(low++, width, start);
      }
      if (high % 2 == 1) {
        addBelow(--high, width, start);
      }
    }
  }
  /// kNone where there is none. Of equal ones the first.
  size_t of(size_t end) const {
    size_t out = kNone;
    for (size_t node = end + num_leaves_; node > 0; node /= 2) {
      if (isCheaper(starts_[node], out, end)) {
        out = starts_[node];
      }
    }
    return out;
  }
  Squares cost(size_t start, size_t end) const {
    const Squares flops = static_cast<Squares>(std::abs(flops_before_[end] - flops_before_[start]));
    return cost_of_[start] + flops * flops;
  }

  static constexpr size_t kNone = std::numeric_limits<size_t>::max();

 private:
  bool isCheaper(size_t a, size_t b, size_t end) const {
    if (a == kNone || b == kNone) {
      return a != kNone;
    }
    return std::pair(cost(a, end), a) < std::pair(cost(b, end), b);
  }
  void addBelow(size_t node, size_t width, size_t start) {
    while (true) {
      const size_t first = std::min(node * width - num_leaves_, flops_before_.size() - 1);
      const size_t last = std::min(node * width - num_leaves_ + width - 1, flops_before_.size() - 1);
      const size_t middle = std::min(node * width - num_leaves_ + width / 2, flops_before_.size() - 1);
      if (isCheaper(start, starts_[node], middle)) {
        std::swap(start, starts_[node]);
      }
      if (isCheaper(start, starts_[node], first)) {
        node = 2 * node;
      } else if (isCheaper(start, starts_[node], last)) {
        node = 2 * node + 1;
      } else {
        return;
      }
      width /= 2;
    }
  }

  const std::vector<int64_t>& flops_before_;
  const std::vector<Squares>& cost_of_;
  size_t num_leaves_;
  std::vector<size_t> starts_;  ///< a heap-ordered tree; kNone where nothing was added
};

/// The starts of layers whose sum of squared FLOPs is least, where they may end up to `last_ends`.
std::vector<size_t> mostEvenCut(const std::vector<int64_t>& flops_before, const std::vector<size_t>& last_ends, size_t num_layers) {
  const size_t num_operators = last_ends.size();
  std::vector<std::vector<size_t>> start_of;  // by layer and end
  std::vector<Squares> cost_of(num_operators + 1, kNoSquares);
  cost_of[0] = 0;
  for (size_t layer = 0; layer < num_layers; ++layer) {
    CheapestStarts starts(flops_before, cost_of);
    std::vector<size_t>& start_of_end = start_of.emplace_back(num_operators + 1, CheapestStarts::kNone);
    std::vector<Squares> next_cost(num_operators + 1, kNoSquares);
    for (size_t end = layer + 1; end <= num_operators; ++end) {
      if (const size_t start = end - 1; cost_of[start] != kNoSquares && last_ends[start] > start) {
        starts.add(start, end, last_ends[start]);
      }
      start_of_end[end] = starts.of(end);
      if (start_of_end[end] != CheapestStarts::kNone) {
        next_cost[end] = starts.cost(start_of_end[end], end);
      }
    }
    cost_of = std::move(next_cost);
  }
  std::vector<size_t> out(num_layers);
  for (size_t layer = num_layers, end = num_operators; layer-- > 0; end = out[layer]) {
    out[layer] = start_of[layer][end];
  }
  return out;
}

}  // namespace

OperatorLayers clusterOperators(const std::vector<ModelOperator>& operators, const std::vector<ModelValue>& values, size_t num_layers, double slack) {
  require(num_layers > 0, "there must be at least one layer");
  require(num_layers <= operators.size(),
          std::to_string(operators.size()) + " operators cannot be cut into " + std::to_string(num_layers) + " layers");
  require(slack >= 0, "slack must not be negative, but is " + std::to_string(slack));
  const CutModel model(operators, values);
  const int64_t total_flops = model.flopsBefore().back();
  const double wanted_limit = (1 + slack) * static_cast<double>(total_flops) / static_cast<double>(num_layers);
  const int64_t least_limit = wanted_limit < static_cast<double>(total_flops) ? static_cast<int64_t>(wanted_limit) : total_flops;

  OperatorLayers out;
  out.flop_limit = leastThat(least_limit, total_flops, [&](int64_t limit) { return canCut(model.lastEnds(model.totalBytes(), limit), num_layers); });
  out.max_received_bytes = leastThat(0, model.totalBytes(), [&](int64_t limit) { return canCut(model.lastEnds(limit, out.flop_limit), num_layers); });
  out.first_operators = mostEvenCut(model.flopsBefore(), model.lastEnds(out.max_received_bytes, out.flop_limit), num_layers);
  return out;
}

}  // namespace xmesh::core
