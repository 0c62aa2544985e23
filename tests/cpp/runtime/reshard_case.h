#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/resharding/plan.h"
#include "random_layouts.h"
#include "runtime/memory/box_copy.h"
#include "runtime/program/program.h"
#include "runtime/reshard_oracle.h"

namespace xmesh::replay {

using layouts::randomInt;
using layouts::shuffleRanks;

/// How a test lays local tensors out in memory.
enum class MemoryLayout { kContiguous, kRandom };

/// A local tensor in memory of its own, exactly as large as needed (so that ASan sees every byte beyond); gaps are filled and watched.
class OwnedTensor {
 public:
  static constexpr uint8_t kGap = 0xA5;

  OwnedTensor(std::vector<int64_t> shape, int64_t item_bytes, MemoryLayout layout, std::mt19937_64& rng) : item_bytes_(item_bytes) {
    const size_t num_dims = shape.size();
    std::vector<int64_t> order(num_dims);
    std::iota(order.begin(), order.end(), int64_t{0});
    std::vector<int64_t> strides(num_dims);
    if (layout == MemoryLayout::kRandom) {
      shuffleRanks(rng, order);
    }
    int64_t stride = 1;
    int64_t last = 0;
    for (size_t i = num_dims; i-- > 0;) {
      const auto dim = static_cast<size_t>(order[i]);
      const bool has_gap = layout == MemoryLayout::kRandom && randomInt(rng, 0, 3) == 0;
      stride *= has_gap ? randomInt(rng, 1, 2) : 1;
      strides[dim] = stride;
      last += std::max<int64_t>(0, shape[dim] - 1) * stride;
      stride = stride * std::max<int64_t>(1, shape[dim]) + (has_gap ? randomInt(rng, 0, 2) : 0);
    }
    const bool is_empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
    // Aligned for every element type; a size that is exact to the byte.
    bytes_ = std::vector<uint8_t>(is_empty ? 0 : static_cast<size_t>((last + 1) * item_bytes), kGap);
    tensor_ = {is_empty ? nullptr : bytes_.data(), std::move(shape), std::move(strides)};
  }
  OwnedTensor(OwnedTensor&&) = default;

  const runtime::LocalTensor& tensor() const { return tensor_; }

  /// Bytes of the i-th element in row-major order.
  uint8_t* at(int64_t index) {
    int64_t offset = 0;
    for (size_t dim = tensor_.shape.size(); dim-- > 0;) {
      offset += index % tensor_.shape[dim] * tensor_.strides[dim];
      index /= tensor_.shape[dim];
    }
    return bytes_.data() + offset * item_bytes_;
  }

  /// True when both, which are laid out alike, have the same bytes in elements and gaps.
  bool hasBytesOf(const OwnedTensor& other) const { return bytes_ == other.bytes_; }

  /// True when no byte has changed since construction.
  bool isUntouched() const {
    return std::all_of(bytes_.begin(), bytes_.end(), [](uint8_t byte) { return byte == kGap; });
  }

  /// True when only elements have changed since construction.
  bool gapsAreIntact(int64_t num_elements) {
    std::vector<uint8_t> is_element(bytes_.size(), 0);
    for (int64_t i = 0; i < num_elements; ++i) {
      std::memset(is_element.data() + (at(i) - bytes_.data()), 1, static_cast<size_t>(item_bytes_));
    }
    for (size_t i = 0; i < bytes_.size(); ++i) {
      if (is_element[i] == 0 && bytes_[i] != kGap) {
        return false;
      }
    }
    return true;
  }

 private:
  int64_t item_bytes_;
  std::vector<uint8_t> bytes_;
  runtime::LocalTensor tensor_;
};

/// One plan with real data on every rank, and the check of the outcome.
class ReshardCase {
 public:
  ReshardCase(const core::ReshardingPlan& plan, int64_t num_ranks, MemoryLayout layout, uint64_t seed) : plan_(plan) {
    std::mt19937_64 rng(seed);
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      src_.emplace_back();
      dst_.emplace_back();
      for (size_t tensor = 0; tensor < plan.tensors.size(); ++tensor) {
        const auto& [src, dst] = plan.tensors[tensor];
        for (const OracleLocal& expected : oracleLocals(src, rank)) {
          src_.back().emplace_back(expected.shape, src.dtype.item_bytes, layout, rng);
          for (size_t e = 0; e < expected.elements.size(); ++e) {
            oracleValue(src, static_cast<int64_t>(tensor), expected.contribution, expected.elements[e],
                        src_.back().back().at(static_cast<int64_t>(e)));
          }
        }
        for (const OracleLocal& expected : oracleLocals(dst, rank)) {
          dst_.back().emplace_back(expected.shape, dst.dtype.item_bytes, layout, rng);
        }
      }
    }
  }

  std::vector<runtime::LocalTensor> src(int64_t rank) const { return tensorsOf(src_[static_cast<size_t>(rank)]); }
  std::vector<runtime::LocalTensor> dst(int64_t rank) const { return tensorsOf(dst_[static_cast<size_t>(rank)]); }

  /// True when nothing has been written into what the rank needs.
  bool isUntouched(int64_t rank) const {
    const std::vector<OwnedTensor>& tensors = dst_[static_cast<size_t>(rank)];
    return std::all_of(tensors.begin(), tensors.end(), [](const OwnedTensor& one) { return one.isUntouched(); });
  }

  /// The first difference from the oracle, or an empty text. Where sums grow on the way floating results may differ in their last bits, but not from
  /// replica to replica.
  std::string firstDifference() {
    const bool has_sums = std::any_of(plan_.messages.begin(), plan_.messages.end(),
                                      [](const core::Message& message) { return message.payload == core::Payload::kPartialSum; });
    std::vector<size_t> next(dst_.size(), 0);  // of each rank's local tensors
    for (size_t tensor = 0; tensor < plan_.tensors.size(); ++tensor) {
      const auto& [src, dst] = plan_.tensors[tensor];
      const Bytes expected = oracleGlobal(src, static_cast<int64_t>(tensor));
      Bytes first_replica = expected;
      std::vector<bool> is_seen(static_cast<size_t>(src.numElements()), false);
      const std::string what = "tensor " + std::to_string(tensor) + " " + src.str() + " -> " + dst.str() + " by " + plan_.strategy + ": rank ";
      for (size_t rank = 0; rank < dst_.size(); ++rank) {
        for (const OracleLocal& wanted : oracleLocals(dst, static_cast<int64_t>(rank))) {
          OwnedTensor& local = dst_[rank].at(next[rank]++);
          for (size_t e = 0; e < wanted.elements.size(); ++e) {
            const auto element = static_cast<size_t>(wanted.elements[e]);
            const auto item_bytes = static_cast<size_t>(dst.dtype.item_bytes);
            const uint8_t* actual = local.at(static_cast<int64_t>(e));
            if (has_sums && !is_seen[element] && oracleIsClose(src, actual, expected.data() + element * item_bytes)) {
              std::memcpy(first_replica.data() + element * item_bytes, actual, item_bytes);
            }
            is_seen[element] = true;
            if (std::memcmp(actual, first_replica.data() + element * item_bytes, item_bytes) != 0) {
              return what + std::to_string(rank) + " has a wrong local element " + std::to_string(e);
            }
          }
          if (!local.gapsAreIntact(static_cast<int64_t>(wanted.elements.size()))) {
            return what + std::to_string(rank) + " wrote between its elements";
          }
        }
      }
    }
    return "";
  }

 private:
  static std::vector<runtime::LocalTensor> tensorsOf(const std::vector<OwnedTensor>& owned) {
    std::vector<runtime::LocalTensor> out;
    for (const OwnedTensor& tensor : owned) {
      out.push_back(tensor.tensor());
    }
    return out;
  }

  const core::ReshardingPlan& plan_;
  std::vector<std::vector<OwnedTensor>> src_;  ///< by rank, its local tensors
  std::vector<std::vector<OwnedTensor>> dst_;
};

/// Peers' ranks where group ranks are the global ranks.
inline std::vector<int32_t> sameRanks(const runtime::Program& program) { return {program.peers().begin(), program.peers().end()}; }

}  // namespace xmesh::replay
