#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace xmesh::core {

/// Half-open range of element indices along one dim.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Interval&) const = default;
};

/// A box of global element indices: one interval per dim (none for a scalar). Elements inside it are counted in row-major order.
using Box = std::vector<Interval>;

int64_t numElements(const Box& box);
/// "[0:4, 2:8]"
std::string boxStr(const Box& box);

}  // namespace xmesh::core
