#include "core/parallelism/conversion_cost.h"

#include <algorithm>
#include <numeric>
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

ConversionCosts::ConversionCosts(std::vector<int64_t> shape, double num_bytes, std::vector<AxisLinks> axes, const CollectiveCostModel& model,
                                 ConversionWays ways)
    : shape_(std::move(shape)), num_bytes_(num_bytes), axes_(std::move(axes)) {
  require(!axes_.empty() && axes_.size() <= kMostAxes, "a mesh of 1 to " + std::to_string(kMostAxes) + " axes, got " + std::to_string(axes_.size()));
  require(shape_.size() <= 16, "a value of at most 16 dims, got " + std::to_string(shape_.size()));
  for (const AxisLinks& axis : axes_) {
    require(axis.size >= 1 && axis.latency >= 0 && axis.seconds_per_byte >= 0,
            "an axis has at least one device, and costs of zero or more; got " + std::to_string(axis.size) + " devices, " +
                std::to_string(axis.latency) + " and " + std::to_string(axis.seconds_per_byte));
  }
  const size_t num_states = shape_.size() + 2;
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
  for (size_t to = 0; to < count; ++to) {
    ways_.push_back(ways == ConversionWays::kAny ? anyTo(to) : directTo(to));
  }
}

size_t ConversionCosts::indexOf(const ValueState& state) const {
  require(state.size() == axes_.size(), "a state has an entry for each of " + std::to_string(axes_.size()) + " axes, got " + valueStateStr(state));
  size_t out = 0;
  for (const AxisState axis : state) {
    require(axis >= kPartialSum && axis < static_cast<AxisState>(shape_.size()),
            "a value of " + std::to_string(shape_.size()) + " dims does not have the state " + valueStateStr(state));
    out = out * (shape_.size() + 2) + static_cast<size_t>(axis - kPartialSum);
  }
  return out;
}

bool ConversionCosts::isPossible(const ValueState& state) const {
  std::vector<int64_t> parts(shape_.size(), 1);
  for (size_t axis = 0; axis < axes_.size(); ++axis) {
    if (state[axis] >= 0) {
      parts[static_cast<size_t>(state[axis])] *= axes_[axis].size;
    }
  }
  for (size_t dim = 0; dim < shape_.size(); ++dim) {
    if (shape_[dim] % parts[dim] != 0) {
      return false;
    }
  }
  return true;
}

void ConversionCosts::addHops(size_t from, size_t axis, const CollectiveCostModel& model) {
  const ValueState& state = states_[from];
  const AxisState held = state[axis];
  if (!isPossible(state)) {
    return;
  }
  double num_bytes = num_bytes_;
  for (size_t other = 0; other < axes_.size(); ++other) {
    if (other != axis && state[other] >= 0) {
      num_bytes /= static_cast<double>(axes_[other].size);
    }
  }
  const auto add = [&](std::optional<Collective> collective, AxisState wanted) {
    const double cost = collective.has_value() ? model.cost(*collective, num_bytes, axes_[axis]) : 0;
    const ValueState to = with(state, axis, wanted);
    if (!isPossible(to)) {
      return;
    }
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
  for (AxisState dim = 0; dim < static_cast<AxisState>(shape_.size()); ++dim) {
    if (dim != held && !isSplitFurther(state, axis, dim)) {
      const std::optional<Collective> sharding = held == kPartialSum ? Collective::kReduceScatter : Collective::kAllToAll;
      add(held == kReplicated ? std::nullopt : sharding, dim);
    }
  }
}

/// E. Dijkstra's from the end, over few states.
ConversionCosts::Ways ConversionCosts::anyTo(size_t to) const {
  Ways out{std::vector<double>(states_.size(), kForbidden), std::vector<const Hop*>(states_.size(), nullptr)};
  std::vector<bool> is_done(states_.size(), false);
  out.costs[to] = 0;
  for (size_t round = 0; round < states_.size(); ++round) {
    size_t nearest = states_.size();
    for (size_t state = 0; state < states_.size(); ++state) {
      if (!is_done[state] && (nearest == states_.size() || out.costs[state] < out.costs[nearest])) {
        nearest = state;
      }
    }
    is_done[nearest] = true;
    for (size_t state = 0; state < states_.size(); ++state) {
      for (const Hop& hop : hops_[state]) {
        if (hop.to == nearest && out.costs[nearest] + hop.cost < out.costs[state]) {
          out.costs[state] = out.costs[nearest] + hop.cost;
          out.next[state] = &hop;
        }
      }
    }
  }
  return out;
}

ConversionCosts::Ways ConversionCosts::directTo(size_t to) const {
  Ways out{std::vector<double>(states_.size(), kForbidden), std::vector<const Hop*>(states_.size(), nullptr)};
  const auto distance = [&](size_t state) {
    size_t count = 0;
    for (size_t axis = 0; axis < axes_.size(); ++axis) {
      count += static_cast<size_t>(states_[state][axis] != states_[to][axis]);
    }
    return count;
  };
  std::vector<size_t> order(states_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return distance(a) < distance(b); });
  out.costs[to] = 0;
  for (const size_t state : order) {
    for (const Hop& hop : hops_[state]) {
      const bool is_direct = state != to && hop.step.to[hop.step.axis] == states_[to][hop.step.axis];
      if (is_direct && out.costs[hop.to] + hop.cost < out.costs[state]) {
        out.costs[state] = out.costs[hop.to] + hop.cost;
        out.next[state] = &hop;
      }
    }
  }
  // Others go some way to where there is one.
  std::erase_if(order, [&](size_t state) { return out.costs[state] < kForbidden; });
  for (bool has_changed = true; has_changed;) {
    has_changed = false;
    for (const size_t state : order) {
      for (const Hop& hop : hops_[state]) {
        if (out.costs[hop.to] + hop.cost < out.costs[state]) {
          out.costs[state] = out.costs[hop.to] + hop.cost;
          out.next[state] = &hop;
          has_changed = true;
        }
      }
    }
  }
  return out;
}

double ConversionCosts::cost(const ValueState& from, const ValueState& to) const { return ways_[indexOf(to)].costs[indexOf(from)]; }

std::vector<ConversionStep> ConversionCosts::steps(const ValueState& from, const ValueState& to) const {
  const Ways& ways = ways_[indexOf(to)];
  std::vector<ConversionStep> out;
  for (const Hop* hop = ways.next[indexOf(from)]; hop != nullptr; hop = ways.next[hop->to]) {
    out.push_back(hop->step);
  }
  return out;
}

CostTable conversionTable(const ConversionCosts& costs, const std::vector<ValueEnd>& made, const std::vector<ValueEnd>& taken, bool has_gradient,
                          int times) {
  CostTable out{made.size(), taken.size(), {}};
  for (const ValueEnd& from : made) {
    for (const ValueEnd& to : taken) {
      out.costs.push_back(times * costs.cost(from.value, to.value) + (has_gradient ? costs.cost(to.gradient, from.gradient) : 0));
    }
  }
  return out;
}

}  // namespace xmesh::core
