#include "core/resharding/box_refinement.h"

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/error.h"
#include "core/tiling.h"

namespace xmesh::core {
namespace {

constexpr size_t kMaxNamed = 5;  ///< boxes that an error text names

/// Sets of ranks, numbered; 0 is the empty one.
class RankSets {
 public:
  RankSets() { number_[{}] = 0; }
  int32_t numberOf(const std::vector<int64_t>& ranks) {
    const auto [entry, is_new] = number_.try_emplace(ranks, static_cast<int32_t>(sets_.size()));
    if (is_new) {
      sets_.push_back(ranks);
    }
    return entry->second;
  }
  const std::vector<int64_t>& operator[](int32_t number) const { return sets_[static_cast<size_t>(number)]; }
  /// The union of two sets, or -1 where they share a rank.
  int32_t joined(int32_t left, int32_t right) {
    const auto [entry, is_new] = joined_.try_emplace(static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right), -1);
    if (is_new) {
      std::vector<int64_t> both;
      std::merge((*this)[left].begin(), (*this)[left].end(), (*this)[right].begin(), (*this)[right].end(), std::back_inserter(both));
      const int32_t number = std::adjacent_find(both.begin(), both.end()) == both.end() ? numberOf(both) : -1;
      entry->second = number;
    }
    return entry->second;
  }

 private:
  std::vector<std::vector<int64_t>> sets_ = {{}};
  std::map<std::vector<int64_t>, int32_t> number_;
  std::unordered_map<uint64_t, int32_t> joined_;
};

/// The cells that all cuts of a tensor's boxes make, whole dim by whole dim, in row-major order.
class Grid {
 public:
  Grid(size_t num_dims, const std::vector<OwnedBox>& held, const std::vector<OwnedBox>& needed) : cuts_(num_dims) {
    for (const std::vector<OwnedBox>* boxes : {&held, &needed}) {
      for (const OwnedBox& owned : *boxes) {
        for (size_t dim = 0; dim < num_dims; ++dim) {
          cuts_[dim].push_back(owned.box[dim].begin);
          cuts_[dim].push_back(owned.box[dim].end);
        }
      }
    }
    for (std::vector<int64_t>& cuts : cuts_) {
      std::sort(cuts.begin(), cuts.end());
      cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
      num_cells_ *= cuts.empty() ? 0 : cuts.size() - 1;
    }
  }
  size_t numCells() const { return num_cells_; }
  Box boxOf(size_t cell) const {
    Box out(cuts_.size());
    for (size_t dim = cuts_.size(); dim-- > 0;) {
      const size_t count = cuts_[dim].size() - 1;
      out[dim] = {cuts_[dim][cell % count], cuts_[dim][cell % count + 1]};
      cell /= count;
    }
    return out;
  }
  /// Calls `visit` with each cell inside the box.
  void forEach(const Box& box, const std::function<void(size_t cell)>& visit) const { forEach(box, 0, 0, visit); }

 private:
  void forEach(const Box& box, size_t dim, size_t cell, const std::function<void(size_t cell)>& visit) const {
    if (dim == cuts_.size()) {
      visit(cell);
      return;
    }
    const std::vector<int64_t>& cuts = cuts_[dim];
    const auto first = static_cast<size_t>(std::lower_bound(cuts.begin(), cuts.end(), box[dim].begin) - cuts.begin());
    for (size_t i = first; cuts[i] < box[dim].end; ++i) {
      forEach(box, dim + 1, cell * (cuts.size() - 1) + i, visit);
    }
  }

  std::vector<std::vector<int64_t>> cuts_;  ///< by dim, ascending
  size_t num_cells_ = 1;
};

/// What one end has of a cell.
struct Owned {
  int32_t ranks = 0;   ///< the set of its owners
  uint64_t boxes = 0;  ///< names the boxes that it is in: those of neighbors that are joined must be the same, or a rank's part would lie in two
  auto operator<=>(const Owned&) const = default;
};

void addOwners(const Grid& grid, const std::vector<OwnedBox>& boxes, RankSets& sets, std::vector<Owned>& cells) {
  constexpr uint64_t kPrime = 0x100000001b3ULL;
  for (size_t i = 0; i < boxes.size(); ++i) {
    if (boxes[i].ranks.empty()) {
      continue;
    }
    const int32_t owners = sets.numberOf(boxes[i].ranks);
    grid.forEach(boxes[i].box, [&](size_t cell) {
      cells[cell] = {sets.joined(cells[cell].ranks, owners), (cells[cell].boxes ^ (i + 1)) * kPrime};
      if (cells[cell].ranks < 0) {
        throw InvalidArgument("boxes of one rank overlap in " + boxStr(grid.boxOf(cell)));
      }
    });
  }
}

struct Joined {
  Box box;
  Owned held;
  Owned needed;
};

/// Joins neighbors along `dim` that agree in all else. Boxes come in row-major order, and stay so.
std::vector<Joined> joinedAlong(std::vector<Joined> boxes, size_t dim) {
  std::map<std::vector<int64_t>, size_t> last;  // by all that must agree
  std::vector<Joined> out;
  for (Joined& next : boxes) {
    std::vector<int64_t> key = {next.held.ranks, static_cast<int64_t>(next.held.boxes), next.needed.ranks, static_cast<int64_t>(next.needed.boxes)};
    for (size_t other = 0; other < next.box.size(); ++other) {
      if (other != dim) {
        key.push_back(next.box[other].begin);
        key.push_back(next.box[other].end);
      }
    }
    const auto [found, is_new] = last.try_emplace(std::move(key), out.size());
    if (!is_new && out[found->second].box[dim].end == next.box[dim].begin) {
      out[found->second].box[dim].end = next.box[dim].end;
      continue;
    }
    found->second = out.size();
    out.push_back(std::move(next));
  }
  return out;
}

/// Throws for what nobody holds.
[[noreturn]] void throwMissing(const std::vector<Joined>& boxes, const RankSets& sets) {
  std::string text;
  size_t count = 0;
  for (const Joined& box : boxes) {
    if (box.held.ranks == 0 && count++ < kMaxNamed) {
      text += (text.empty() ? "" : ", ") + boxStr(box.box) + " for rank " + std::to_string(sets[box.needed.ranks].front());
    }
  }
  throw InvalidArgument("nobody holds " + text + (count > kMaxNamed ? " and " + std::to_string(count - kMaxNamed) + " more boxes" : ""));
}

}  // namespace

std::vector<SharedBox> refineBoxes(const std::vector<int64_t>& shape, const std::vector<OwnedBox>& held, const std::vector<OwnedBox>& needed) {
  const Grid grid(shape.size(), held, needed);
  RankSets sets;
  std::vector<Owned> held_cells(grid.numCells());
  std::vector<Owned> needed_cells(grid.numCells());
  addOwners(grid, held, sets, held_cells);
  addOwners(grid, needed, sets, needed_cells);
  std::vector<Joined> boxes;
  bool is_missing = false;
  for (size_t cell = 0; cell < grid.numCells(); ++cell) {
    if (needed_cells[cell].ranks != 0) {
      boxes.push_back({grid.boxOf(cell), held_cells[cell], needed_cells[cell]});
      is_missing = is_missing || held_cells[cell].ranks == 0;
    }
  }
  for (size_t dim = shape.size(); dim-- > 0;) {
    boxes = joinedAlong(std::move(boxes), dim);
  }
  if (is_missing) {
    throwMissing(boxes, sets);
  }
  std::vector<SharedBox> out;
  out.reserve(boxes.size());
  for (Joined& box : boxes) {
    out.push_back({std::move(box.box), sets[box.held.ranks], sets[box.needed.ranks]});
  }
  return out;
}

std::vector<OwnedBox> ownedBoxes(const TensorSpec& spec) {
  if (spec.isBoxed()) {
    return spec.boxes;
  }
  const Tiling tiling(spec);
  std::map<std::vector<int64_t>, std::vector<int64_t>> ranks_of;  // by the begins and ends of a box
  for (int64_t i = 0; i < spec.mesh.numRanks(); ++i) {
    const std::vector<int64_t> coord = spec.mesh.coordOfIndex(i);
    std::vector<std::vector<int64_t>> parts = {{}};
    for (size_t dim = 0; dim < spec.shape.size(); ++dim) {
      std::vector<std::vector<int64_t>> longer;
      for (const DimPiece& piece : tiling.pieces(static_cast<int64_t>(dim))) {
        if (piece.part != tiling.partOf(static_cast<int64_t>(dim), coord)) {
          continue;
        }
        for (std::vector<int64_t> part : parts) {
          part.push_back(piece.interval.begin);
          part.push_back(piece.interval.end);
          longer.push_back(std::move(part));
        }
      }
      parts = std::move(longer);
    }
    for (const std::vector<int64_t>& part : parts) {
      ranks_of[part].push_back(spec.mesh.ranks()[static_cast<size_t>(i)]);
    }
  }
  std::vector<OwnedBox> out;
  for (auto& [ends, ranks] : ranks_of) {
    OwnedBox owned;
    for (size_t dim = 0; dim < spec.shape.size(); ++dim) {
      owned.box.push_back({ends[2 * dim], ends[2 * dim + 1]});
    }
    std::sort(ranks.begin(), ranks.end());
    owned.ranks = std::move(ranks);
    out.push_back(std::move(owned));
  }
  return out;
}

TensorSpec withoutRanks(const TensorSpec& spec, const std::vector<int64_t>& gone) {
  TensorSpec out{spec.shape, spec.dtype, {}, {}, ownedBoxes(spec)};
  for (OwnedBox& owned : out.boxes) {
    std::erase_if(owned.ranks, [&](int64_t rank) { return std::find(gone.begin(), gone.end(), rank) != gone.end(); });
  }
  return out;
}

}  // namespace xmesh::core
