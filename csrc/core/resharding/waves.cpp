#include "core/resharding/waves.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/resharding/box_refinement.h"

namespace xmesh::core {
namespace {

/// Bytes by rank and end.
using Bytes = std::map<std::pair<bool, int64_t>, int64_t>;

/// What of a tensor in boxes lies between `range` of a dim.
TensorSpec slabOf(const TensorSpec& spec, size_t dim, Interval range) {
  TensorSpec out{spec.shape, spec.dtype, {}, {}, {}};
  for (const OwnedBox& owned : spec.boxes) {
    const Interval inside{std::max(owned.box[dim].begin, range.begin), std::min(owned.box[dim].end, range.end)};
    if (inside.begin < inside.end) {
      out.boxes.push_back(owned);
      out.boxes.back().box[dim] = inside;
    }
  }
  return out;
}

/// Bytes of each rank's boxes that another rank may need, or gets.
Bytes bytesOf(const TensorPair& pair) {
  Bytes out;
  for (const TensorSpec* spec : {&pair.src, &pair.dst}) {
    for (const OwnedBox& owned : ownedBoxes(*spec)) {
      for (const int64_t rank : owned.ranks) {
        out[{spec == &pair.src, rank}] += numElements(owned.box) * spec->dtype.item_bytes;
      }
    }
  }
  return out;
}

class Waves {
 public:
  explicit Waves(int64_t max_bytes) : max_bytes_(max_bytes) {}

  void add(const TensorPair& pair, int64_t index) {
    const Bytes bytes = bytesOf(pair);
    if (!fitsAlone(bytes)) {
      require(!pair.src.hasPartial(),
              "tensor " + std::to_string(index) + " has a Partial source, and is larger than the " + std::to_string(max_bytes_) + " bytes of a wave");
      addSlabs({withoutRanks(pair.src, {}), withoutRanks(pair.dst, {})}, index, 0);
      return;
    }
    put(pair, index, bytes);
  }
  std::vector<Wave> take() && { return std::move(waves_); }

 private:
  bool fitsAlone(const Bytes& bytes) const {
    return std::all_of(bytes.begin(), bytes.end(), [this](const auto& entry) { return entry.second <= max_bytes_; });
  }

  void put(TensorPair pair, int64_t index, const Bytes& bytes) {
    const bool fits = !waves_.empty() && std::all_of(bytes.begin(), bytes.end(), [this](const auto& entry) {
      const auto used = used_.find(entry.first);
      return entry.second + (used == used_.end() ? 0 : used->second) <= max_bytes_;
    });
    if (!fits) {
      waves_.emplace_back();
      used_.clear();
    }
    for (const auto& [key, num_bytes] : bytes) {
      used_[key] += num_bytes;
    }
    waves_.back().tensors.push_back(std::move(pair));
    waves_.back().indices.push_back(index);
  }

  /// A part that is too large: slabs of `dim` that are as thick as the bound lets them, in turn cut along the next dim where one index is too much.
  void addSlabs(const TensorPair& pair, int64_t index, size_t dim) {
    if (dim == pair.src.shape.size()) {
      put(pair, index, bytesOf(pair));
      return;
    }
    int64_t begin = pair.dst.shape[dim];
    int64_t end = 0;
    for (const OwnedBox& owned : pair.dst.boxes) {
      begin = std::min(begin, owned.box[dim].begin);
      end = std::max(end, owned.box[dim].end);
    }
    while (begin < end) {
      const auto slab = [&](int64_t until) { return TensorPair{slabOf(pair.src, dim, {begin, until}), slabOf(pair.dst, dim, {begin, until})}; };
      int64_t most = begin;  // the slab [begin, most) fits; bytes grow with it
      for (int64_t least_too_many = end + 1; most + 1 < least_too_many;) {
        const int64_t middle = most + (least_too_many - most) / 2;
        (fitsAlone(bytesOf(slab(middle))) ? most : least_too_many) = middle;
      }
      TensorPair part = slab(std::max(most, begin + 1));
      if (part.dst.isBoxed() && most > begin) {
        const Bytes bytes = bytesOf(part);
        put(std::move(part), index, bytes);
      } else if (part.dst.isBoxed()) {
        addSlabs(part, index, dim + 1);
      }
      begin = std::max(most, begin + 1);
    }
  }

  const int64_t max_bytes_;
  std::vector<Wave> waves_;
  Bytes used_;  ///< of the last wave
};

}  // namespace

std::vector<Wave> cutIntoWaves(const std::vector<TensorPair>& tensors, int64_t max_bytes) {
  require(max_bytes > 0, "a wave has at least one byte, got " + std::to_string(max_bytes));
  Waves waves(max_bytes);
  for (size_t i = 0; i < tensors.size(); ++i) {
    waves.add(tensors[i], static_cast<int64_t>(i));
  }
  return std::move(waves).take();
}

}  // namespace xmesh::core
