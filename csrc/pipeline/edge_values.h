#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

namespace xmesh::pipeline {

/// The values that go from one stage to a later one, by their positions among the outputs of the one and the inputs of the other.
struct EdgeValues {
  int32_t from = 0;
  int32_t to = 0;
  std::vector<int64_t> from_positions;
  std::vector<int64_t> to_positions;
  std::vector<uint8_t> is_differentiable;
  /// The producer ignores the gradient on this rank: another rank of its mesh, whose copy of the value is as good, takes it for all.
  std::vector<uint8_t> drops_gradient;
  bool is_local = false;      ///< both stages are on this rank and the values need not move
  bool has_producer = false;  ///< `from` is on this rank
  bool has_consumer = false;  ///< `to` is on this rank
  bool is_passing = false;    ///< `to` holds none of the values for its backward, but what autograd saves of them

  /// Positions in the lists above of those that have a gradient.
  std::vector<size_t> differentiable() const;
};

/// What a stage looks like.
struct StageValues {
  int32_t stage = 0;
  std::vector<std::string> inputs;       ///< names of its input values, in order
  std::vector<std::string> outputs;      ///< names of its output values
  std::vector<int64_t> model_positions;  ///< those inputs that the user passes
  bool is_alone = false;                 ///< its mesh is this rank only
  std::string whole_because{};           ///< why its backward is never split; empty where that depends on the graph
  bool waits_in_weights = false;         ///< in each of its W, or behind it, the ranks of its mesh wait for each other: none runs before its turn
  int32_t weights_group = 0;             ///< stages of one number add to the same gradients
  c10::Device device = c10::kCPU;        ///< that it computes on
};

}  // namespace xmesh::pipeline
