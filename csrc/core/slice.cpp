#include "core/slice.h"

namespace xmesh::core {

int64_t numElements(const Box& box) {
  int64_t count = 1;
  for (const Interval& interval : box) {
    count *= interval.size();
  }
  return count;
}

std::string boxStr(const Box& box) {
  std::string out = "[";
  for (size_t dim = 0; dim < box.size(); ++dim) {
    out += (dim > 0 ? ", " : "") + std::to_string(box[dim].begin) + ":" + std::to_string(box[dim].end);
  }
  return out + "]";
}

}  // namespace xmesh::core
