#include "core/parallelism/conversion_cost.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/error.h"

namespace xmesh::core {
namespace {

constexpr size_t kMostAxes = 3;

/// Whether an axis further right shards the dim too: this axis's part of it is no run then.
bool isSplitFurther(const ValueState& state, size_t axis, AxisState dim) {
  return std::find(state.begin() + static_cast<std::ptrdiff_t>(axis) + 1, state.end(), dim) != state.end();
}

ValueState with(ValueState state, size_t axis, AxisState wanted) {
  state[axis] = wanted;
  return state;
}

}  // namespace

std::string valueStateStr(const ValueState& state) {
  std::string out;
  for (const AxisState axis : state) {
    out += axis == kReplicated ? "R" : axis == kPartialSum ? "P" : "S" + std::to_string(axis);
  }
  return out;
}

ConversionCosts::ConversionCosts(size_t num_dims, double num_bytes, std::vector<AxisLinks> axes, const CollectiveCostModel& model)
    : num_dims_(num_dims), num_bytes_(num_bytes), axes_(std::move(axes)) {
  require(!axes_.empty() && axes_.size() <= kMostAxes, "a mesh of 1 to " + std::to_string(kMostAxes) + " axes, got " + std::to_string(axes_.size()));
  require(num_dims <= 16, "a value of at most 16 dims, got " + std::to_string(num_dims));
  const size_t num_states = num_dims + 2;
  size_t count = 1;
  for (size_t axis = 0; axis < axes_.size(); ++axis) {
    count *= num_states;
  }
  for (size_t index = 0; index < count; ++index) {
    ValueState state(axes_.size());
    size_t rest = index;
    for (size_t axis = axes_.size(); axis-- > 0; rest /= num_states) {
      state[axis] = static_cast<AxisState>(static_cast<int64_t>(rest % num_states) + kPartialSum);
    }
    states_.push_back(std::move(state));
  }
  hops_.resize(count);
  for (size_t from = 0; from < count; ++from) {
    for (size_t axis = 0; axis < axes_.size(); ++axis) {
      addHops(from, axis, model);
    }
  }
  for (size_t from = 0; from < count; ++from) {
    ways_.push_back(waysFrom(from));
  }
}

size_t ConversionCosts::indexOf(const ValueState& state) const {
  require(state.size() == axes_.size(), "a state has an entry for each of " + std::to_string(axes_.size()) + " axes, got " + valueStateStr(state));
  size_t out = 0;
  for (const AxisState axis : state) {
    require(axis >= kPartialSum && axis < static_cast<AxisState>(num_dims_),
            "a value of " + std::to_string(num_dims_) + " dims does not have the state " + valueStateStr(state));
    out = out * (num_dims_ + 2) + static_cast<size_t>(axis - kPartialSum);
  }
  return out;
}

void ConversionCosts::addHops(size_t from, size_t axis, const CollectiveCostModel& model) {
  const ValueState& state = states_[from];
  const AxisState held = state[axis];
  double num_bytes = num_bytes_;
  for (size_t other = 0; other < axes_.size(); ++other) {
    if (other != axis && state[other] >= 0) {
      num_bytes /= static_cast<double>(axes_[other].size);
    }
  }
  const auto add = [&](std::optional<Collective> collective, AxisState wanted) {
    const double cost = collective.has_value() ? model.cost(*collective, num_bytes, axes_[axis]) : 0;
    const ValueState to = with(state, axis, wanted);
    hops_[from].push_back({indexOf(to), cost, {axis, to, collective, collective.has_value() ? num_bytes : 0}});
  };
  if (held >= 0 && isSplitFurther(state, axis, held)) {
    return;
  }
  if (held == kReplicated) {
    add(std::nullopt, kPartialSum);
  } else {
    add(held == kPartialSum ? Collective::kAllReduce : Collective::kAllGather, kReplicated);
  }
  for (AxisState dim = 0; dim < static_cast<AxisState>(num_dims_); ++dim) {
    if (dim != held && !isSplitFurther(state, axis, dim)) {
      const std::optional<Collective> sharding = held == kPartialSum ? Collective::kReduceScatter : Collective::kAllToAll;
      add(held == kReplicated ? std::nullopt : sharding, dim);
    }
  }
}

/// E. Dijkstra's, over few states.
ConversionCosts::Ways ConversionCosts::waysFrom(size_t from) const {
  Ways out{std::vector<double>(states_.size(), std::numeric_limits<double>::infinity()), std::vector<size_t>(states_.size(), from)};
  std::vector<bool> is_done(states_.size(), false);
  out.costs[from] = 0;
  while (true) {
    size_t nearest = states_.size();
    for (size_t state = 0; state < states_.size(); ++state) {
      if (!is_done[state] && (nearest == states_.size() || out.costs[state] < out.costs[nearest])) {
        nearest = state;
      }
    }
    if (nearest == states_.size()) {
      return out;
    }
    is_done[nearest] = true;
    for (const Hop& hop : hops_[nearest]) {
      if (const double cost = out.costs[nearest] + hop.cost; cost < out.costs[hop.to]) {
        out.costs[hop.to] = cost;
        out.before[hop.to] = nearest;
      }
    }
  }
}

double ConversionCosts::cost(const ValueState& from, const ValueState& to) const { return ways_[indexOf(from)].costs[indexOf(to)]; }

std::vector<ConversionStep> ConversionCosts::steps(const ValueState& from, const ValueState& to) const {
  const size_t source = indexOf(from);
  const Ways& ways = ways_[source];
  std::vector<ConversionStep> out;
  for (size_t state = indexOf(to); state != source; state = ways.before[state]) {
    const std::vector<Hop>& hops = hops_[ways.before[state]];
    const auto taken = std::min_element(hops.begin(), hops.end(), [state](const Hop& a, const Hop& b) {
      return std::pair(a.to != state, a.cost) < std::pair(b.to != state, b.cost);
    });
    out.push_back(taken->step);
  }
  std::reverse(out.begin(), out.end());
  return out;
}

}  // namespace xmesh::core
