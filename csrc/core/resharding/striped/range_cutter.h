#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "core/resharding/plan.h"
#include "core/resharding/striped/slice_classes.h"

namespace xmesh::core {

/// Walks a list of ranges from its front, and appends what it cuts off to another list.
class RangeCutter {
 public:
  RangeCutter(const ReshardingPlan& plan, std::span<const SliceRange> ranges, std::vector<SliceRange>& out)
      : plan_(plan), ranges_(ranges), out_(out) {}

  /// About `num_bytes` more, whole elements, at least one; nothing at the end. Returns how many bytes these are.
  int64_t take(double num_bytes) {
    const size_t first = out_.size();
    int64_t taken_bytes = 0;
    while (index_ < ranges_.size()) {
      const SliceRange& range = ranges_[index_];
      const int64_t item_bytes = plan_.itemBytes(plan_.tasks[static_cast<size_t>(range.task)]);
      const int64_t wanted = std::llround((num_bytes - static_cast<double>(taken_bytes)) / static_cast<double>(item_bytes));
      const int64_t begin = range.begin + offset_;
      const int64_t end = std::min(range.end, begin + std::max<int64_t>(wanted, out_.size() == first ? 1 : 0));
      if (end == begin) {
        break;
      }
      out_.push_back({range.task, begin, end});
      taken_bytes += (end - begin) * item_bytes;
      offset_ = end - range.begin;
      if (end == range.end) {
        ++index_;
        offset_ = 0;
      }
    }
    return taken_bytes;
  }

 private:
  const ReshardingPlan& plan_;
  std::span<const SliceRange> ranges_;
  std::vector<SliceRange>& out_;
  size_t index_ = 0;
  int64_t offset_ = 0;
};

}  // namespace xmesh::core
