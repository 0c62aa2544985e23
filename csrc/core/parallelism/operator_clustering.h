#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace xmesh::core {

/// One operator of a model, in the order in which they run.
struct ModelOperator {
  int64_t num_flops = 0;
  std::vector<size_t> reads;  ///< numbers of values; one that is named twice counts once
};

/// What operators read. A value without a maker is a parameter or an input of the model: to bring it costs nothing.
struct ModelValue {
  std::optional<size_t> maker;  ///< number of the operator
  int64_t num_bytes = 0;
};

/// Operators cut into layers: consecutive ones make a layer, none is empty.
struct OperatorLayers {
  std::vector<size_t> first_operators;  ///< of each layer
  int64_t max_received_bytes = 0;       ///< the most that one layer receives from earlier ones
  int64_t flop_limit = 0;               ///< no layer has more FLOPs
};

/// Cuts operators into exactly `num_layers` layers: L. Zheng et al., Alpa (OSDI 2022), eq. 6.
///
/// C(i, k) is the bytes that operators i..k read of values made before i, each value once. The largest C of all layers is made least, where no
/// layer has more than (1 + slack) * total / num_layers FLOPs. Where no cut keeps that limit, the smallest limit that one keeps takes its place.
/// Among cuts with the least largest C, the one with the least variance of FLOPs per layer is taken, and among equal ones always the same. Both
/// are exact: all arithmetic is in integers.
///
/// C(i, k) only grows with k, and so do a layer's FLOPs. A limit on both therefore lets a layer that starts at i end anywhere up to one last place,
/// and whether num_layers such layers exist is found in one pass over the operators. The least limit on C is bisected so. The least sum of squares
/// takes O(num_layers * operators * log^2) steps, however many operators have no FLOPs.
///
/// Throws InvalidArgument for fewer operators than layers, for no layer, for a negative slack, FLOPs or bytes, for a value that is read before it is
/// made, and for sums of 2^62 or more.
OperatorLayers clusterOperators(const std::vector<ModelOperator>& operators, const std::vector<ModelValue>& values, size_t num_layers, double slack);

}  // namespace xmesh::core
