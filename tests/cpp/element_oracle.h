#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/resharding/plan.h"

namespace xmesh::layouts {

inline std::vector<int64_t> indicesFrom(int64_t begin, int64_t count) {
  std::vector<int64_t> out(static_cast<size_t>(count));
  std::iota(out.begin(), out.end(), begin);
  return out;
}

/// Which global indices of each dim the rank at `coord` holds, in local order: torch's rule on explicit lists of indices.
inline std::vector<std::vector<int64_t>> heldIndices(const core::TensorSpec& spec, const std::vector<int64_t>& coord) {
  const auto chunk = [](const std::vector<int64_t>& all, int64_t count, int64_t index) {
    const auto size = static_cast<int64_t>(all.size());
    const int64_t each = (size + count - 1) / count;
    std::vector<int64_t> out;
    for (int64_t i = each * index; i < std::min(size, each * (index + 1)); ++i) {
      out.push_back(all[static_cast<size_t>(i)]);
    }
    return out;
  };
  std::vector<std::vector<int64_t>> out;
  for (int64_t extent : spec.shape) {
    out.push_back(indicesFrom(0, extent));
  }
  for (size_t axis = 0; axis < spec.placements.size(); ++axis) {
    const core::Placement& placement = spec.placements[axis];
    if (!placement.isShard()) {
      continue;
    }
    std::vector<int64_t>& dim = out[static_cast<size_t>(placement.dim)];
    const int64_t factor = placement.kind == core::PlacementKind::kStridedShard ? placement.split_factor : 1;
    std::vector<int64_t> kept;
    for (int64_t outer = 0; outer < factor; ++outer) {
      for (int64_t index : chunk(chunk(dim, factor, outer), spec.mesh.shape()[axis], coord[axis])) {
        kept.push_back(index);
      }
    }
    dim = kept;
  }
  return out;
}

/// Flat global indices of a product of index lists, row-major.
inline std::vector<int64_t> flatIndices(const std::vector<int64_t>& shape, const std::vector<std::vector<int64_t>>& lists) {
  std::vector<int64_t> out = {0};
  for (size_t dim = 0; dim < lists.size(); ++dim) {
    std::vector<int64_t> next;
    for (int64_t base : out) {
      for (int64_t index : lists[dim]) {
        next.push_back(base * shape[dim] + index);
      }
    }
    out = std::move(next);
  }
  return out;
}

/// Replays a plan element by element on what ranks hold, knowing nothing of slices, intervals or the planner's tables but the messages' boxes.
/// Returns what is wrong first, or an empty string.
class ElementOracle {
 public:
  static std::string check(const core::ReshardingPlan& plan) {
    for (size_t tensor = 0; tensor < plan.tensors.size(); ++tensor) {
      const std::string wrong = ElementOracle(plan, tensor).run();
      if (!wrong.empty()) {
        return wrong;
      }
    }
    return "";
  }

 private:
  ElementOracle(const core::ReshardingPlan& plan, size_t tensor) : plan_(plan), tensor_(tensor) {
    const auto& [src, dst] = plan.tensors[tensor];
    const auto num_elements = static_cast<size_t>(src.numElements());
    for (int64_t rank : plan.participants()) {
      held_[rank].assign(num_elements, 0);
      needed_[rank].assign(num_elements, false);
      received_[rank].assign(num_elements, false);
      given_[rank].assign(num_elements, false);
      has_value_[rank].assign(num_elements, false);
    }
    for (int64_t i = 0; i < src.mesh.numRanks(); ++i) {
      const std::vector<int64_t> coord = src.mesh.coordOfIndex(i);
      int64_t contribution = 0;
      int64_t num_contributions = 1;
      for (size_t axis = 0; axis < coord.size(); ++axis) {
        if (src.placements[axis].kind == core::PlacementKind::kPartial) {
          contribution = contribution * src.mesh.shape()[axis] + coord[axis];
          num_contributions *= src.mesh.shape()[axis];
        }
      }
      full_ = (uint64_t{1} << num_contributions) - 1;
      for (int64_t element : flatIndices(src.shape, heldIndices(src, coord))) {
        held_[src.mesh.ranks()[static_cast<size_t>(i)]][static_cast<size_t>(element)] = uint64_t{1} << contribution;
      }
    }
    own_ = held_;
    for (int64_t i = 0; i < dst.mesh.numRanks(); ++i) {
      for (int64_t element : flatIndices(dst.shape, heldIndices(dst, dst.mesh.coordOfIndex(i)))) {
        needed_[dst.mesh.ranks()[static_cast<size_t>(i)]][static_cast<size_t>(element)] = true;
      }
    }
  }

  std::string run() {
    for (size_t i = 0; i < plan_.messages.size(); ++i) {
      const core::Message& message = plan_.messages[i];
      const core::UnitTask& task = plan_.tasks[static_cast<size_t>(message.task)];
      if (task.tensor != static_cast<int64_t>(tensor_)) {
        continue;
      }
      std::vector<std::vector<int64_t>> lists;
      for (const core::Interval& interval : task.box) {
        lists.push_back(indicesFrom(interval.begin, interval.size()));
      }
      const std::vector<int64_t> elements = flatIndices(plan_.tensors[tensor_].src.shape, lists);
      for (int64_t k = message.begin; k < message.end; ++k) {
        const std::string wrong = move(message, elements.at(static_cast<size_t>(k)));
        if (!wrong.empty()) {
          return "message " + std::to_string(i) + ", element " + std::to_string(k) + ": " + wrong;
        }
      }
    }
    for (const auto& [rank, elements] : needed_) {
      for (size_t element = 0; element < elements.size(); ++element) {
        if (elements[element] && held_[rank][element] != full_) {
          return "rank " + std::to_string(rank) + " ends without element " + std::to_string(element);
        }
        if (!elements[element] && received_[rank][element] && !given_[rank][element]) {
          return "rank " + std::to_string(rank) + " keeps element " + std::to_string(element);
        }
      }
    }
    return "";
  }

  std::string move(const core::Message& message, int64_t element) {
    const auto index = static_cast<size_t>(element);
    const bool is_value = message.payload == core::Payload::kValue;
    if (!needed_.at(message.dst_rank).at(index) && (is_value || own_.at(message.dst_rank).at(index) == 0)) {
      return "the receiver does not need it";
    }
    return is_value ? moveValue(message, index) : moveInput(message, index);
  }

  std::string moveValue(const core::Message& message, size_t index) {
    uint64_t& held = held_[message.dst_rank][index];
    if (held_[message.src_rank][index] != full_ || held == full_ || (full_ != 1 && !needed_[message.src_rank][index])) {
      return "the sender lacks it, or the receiver has it already";
    }
    if (received_[message.dst_rank][index] && !given_[message.dst_rank][index]) {
      return "the receiver reduces it";
    }
    held = full_;
    has_value_[message.src_rank][index] = true;
    has_value_[message.dst_rank][index] = true;
    return "";
  }

  std::string moveInput(const core::Message& message, size_t index) {
    const bool is_sum = message.payload == core::Payload::kPartialSum;
    uint64_t& from = held_[message.src_rank][index];
    uint64_t& to = held_[message.dst_rank][index];
    const uint64_t sent = is_sum ? from : uint64_t{1} << message.contribution;
    if (full_ == 1 || given_[message.src_rank][index] || given_[message.dst_rank][index] || (sent & to) != 0) {
      return "no contribution, given away, or received already";
    }
    if (is_sum ? !received_[message.src_rank][index] || has_value_[message.src_rank][index] : own_[message.src_rank][index] != sent) {
      return "nothing to send";
    }
    to |= sent;
    received_[message.dst_rank][index] = true;
    if (is_sum) {
      from = 0;
      given_[message.src_rank][index] = true;
    }
    return "";
  }

  const core::ReshardingPlan& plan_;
  size_t tensor_;
  uint64_t full_ = 1;
  std::map<int64_t, std::vector<uint64_t>> held_;  ///< by rank and element: a bit per contribution
  std::map<int64_t, std::vector<uint64_t>> own_;   ///< the same before anything moved
  std::map<int64_t, std::vector<bool>> needed_;
  std::map<int64_t, std::vector<bool>> received_;   ///< contributions, alone or in sums
  std::map<int64_t, std::vector<bool>> given_;      ///< the rank's sum has been sent on
  std::map<int64_t, std::vector<bool>> has_value_;  ///< received, or reduced and sent
};

}  // namespace xmesh::layouts
