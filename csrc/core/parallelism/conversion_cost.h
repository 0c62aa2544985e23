#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/parallelism/collective_cost.h"
#include "core/parallelism/cost_table.h"

namespace xmesh::core {

/// How one mesh axis holds a value: it shards the dim of that number, or one of the two below.
using AxisState = int8_t;
constexpr AxisState kReplicated = -1;
constexpr AxisState kPartialSum = -2;  ///< the devices along the axis hold summands
/// One AxisState per mesh axis. Where several axes shard one dim, the axis further left splits first, as DeviceMesh and DTensor have it.
using ValueState = std::vector<AxisState>;

/// "S0R": per axis Sdim, R or P.
std::string valueStateStr(const ValueState& state);

/// A value changes how one axis holds it.
struct ConversionStep {
  size_t axis = 0;
  ValueState to;                         ///< the whole value's state afterwards
  std::optional<Collective> collective;  ///< along that axis; none where each device does it by itself
  double num_bytes = 0;                  ///< as CollectiveCostModel counts them
  bool operator==(const ConversionStep&) const = default;
};

/// The ways that conversions may take.
enum class ConversionWays : uint8_t {
  kAny,    ///< the cheapest of all, which may shard a value over another axis meanwhile, so that fewer bytes cross a slow one
  kDirect  ///< axis by axis to where it has to be, as Alpa's; any where there is no such way
};

/// What it costs to bring one value from any state on a mesh to any other: the cheapest way over collectives along single axes. To slice, and to take
/// a value for a sum that the first device along an axis has all of, costs nothing. (L. Zheng et al., Alpa, OSDI 2022, Table 2, has five of these.)
class ConversionCosts {
 public:
  /// Takes a value's shape and bytes. A state is possible only where its axes divide the dims that they shard. Throws InvalidArgument for
  /// a mesh of more than 3 axes, where states would be too many, for axes without devices and for costs below zero.
  ConversionCosts(std::vector<int64_t> shape, double num_bytes, std::vector<AxisLinks> axes, const CollectiveCostModel& model,
                  ConversionWays ways = ConversionWays::kAny);

  ConversionCosts(const ConversionCosts&) = delete;
  ConversionCosts& operator=(const ConversionCosts&) = delete;

  /// All there are, also those that are not possible.
  const std::vector<ValueState>& states() const { return states_; }
  /// kForbidden where one of them is not possible.
  double cost(const ValueState& from, const ValueState& to) const;
  /// That way; of equally cheap ones always the same.
  std::vector<ConversionStep> steps(const ValueState& from, const ValueState& to) const;

 private:
  struct Hop {
    size_t to = 0;
    double cost = 0;
    ConversionStep step;
  };
  /// To one state from all others.
  struct Ways {
    std::vector<double> costs;
    std::vector<const Hop*> next;  ///< null at the end
  };
  size_t indexOf(const ValueState& state) const;
  bool isPossible(const ValueState& state) const;
  void addHops(size_t from, size_t axis, const CollectiveCostModel& model);
  Ways anyTo(size_t to) const;
  Ways directTo(size_t to) const;

  const std::vector<int64_t> shape_;
  const double num_bytes_;
  const std::vector<AxisLinks> axes_;
  std::vector<ValueState> states_;
  std::vector<std::vector<Hop>> hops_;  ///< by state; not changed once ways point to them
  std::vector<Ways> ways_;              ///< by target
};

/// One end of a value: how an operator leaves it and wants its gradient, or how one takes it and leaves its gradient.
struct ValueEnd {
  ValueState value;
  ValueState gradient;
};

/// What it costs to bring a value `times` times from each of the ends that `made` lists (rows) to each that `taken` lists, and, where it has one,
/// its gradient back once.
CostTable conversionTable(const ConversionCosts& costs, const std::vector<ValueEnd>& made, const std::vector<ValueEnd>& taken, bool has_gradient,
                          int times);

}  // namespace xmesh::core
