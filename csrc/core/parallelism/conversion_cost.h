#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/parallelism/collective_cost.h"

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
  ValueState to;                         ///< of the whole value, afterwards
  std::optional<Collective> collective;  ///< along that axis; none where each device does it by itself
  double num_bytes = 0;                  ///< of the collective: see CollectiveCostModel
  bool operator==(const ConversionStep&) const = default;
};

/// What it costs to bring one value from any state on a mesh to any other: the cheapest way over collectives along single axes. To slice, and to take
/// a value for a sum that the first device along an axis has all of, costs nothing. (L. Zheng et al., Alpa, OSDI 2022, Table 2, has five of these.)
class ConversionCosts {
 public:
  /// Of a value of `num_dims` dims and so many bytes. Throws InvalidArgument for a mesh of more than 3 axes, where states would be too many.
  ConversionCosts(size_t num_dims, double num_bytes, std::vector<AxisLinks> axes, const CollectiveCostModel& model);

  /// All there are.
  const std::vector<ValueState>& states() const { return states_; }
  double cost(const ValueState& from, const ValueState& to) const;
  /// That way; of equally cheap ones always the same.
  std::vector<ConversionStep> steps(const ValueState& from, const ValueState& to) const;

 private:
  struct Hop {
    size_t to = 0;
    double cost = 0;
    ConversionStep step;
  };
  struct Ways {
    std::vector<double> costs;   ///< by target
    std::vector<size_t> before;  ///< by target, the state that the last hop starts from
  };
  size_t indexOf(const ValueState& state) const;
  void addHops(size_t from, size_t axis, const CollectiveCostModel& model);
  Ways waysFrom(size_t from) const;

  const size_t num_dims_;
  const double num_bytes_;
  const std::vector<AxisLinks> axes_;
  std::vector<ValueState> states_;
  std::vector<std::vector<Hop>> hops_;  ///< by state
  std::vector<Ways> ways_;              ///< by source
};

}  // namespace xmesh::core
