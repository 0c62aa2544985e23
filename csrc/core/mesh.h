#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace xmesh::core {

/// A grid of distinct global ranks in row-major order; its dimensions are axes. Immutable value, safe to share between threads.
class Mesh {
 public:
  Mesh() = default;
  /// Throws InvalidArgument when the shape's product is not the number of ranks, a rank is negative, or a rank repeats.
  Mesh(std::vector<int64_t> shape, std::vector<int64_t> ranks);

  const std::vector<int64_t>& shape() const { return shape_; }
  const std::vector<int64_t>& ranks() const { return ranks_; }
  int64_t numAxes() const { return static_cast<int64_t>(shape_.size()); }
  int64_t numRanks() const { return static_cast<int64_t>(ranks_.size()); }
  /// Row-major coordinate of the i-th rank of ranks().
  std::vector<int64_t> coordOfIndex(int64_t index) const;
  /// Index of a global rank in ranks(), or -1.
  int64_t indexOfRank(int64_t global_rank) const;

  /// "[[0, 1], [2, 3]]"
  std::string str() const;
  bool operator==(const Mesh&) const = default;

 private:
  std::vector<int64_t> shape_;
  std::vector<int64_t> ranks_;
};

}  // namespace xmesh::core
