#include "core/resharding/striped/reduction_cutter.h"

#include <algorithm>
#include <tuple>

namespace xmesh::core {
namespace {

bool holdsOne(const std::vector<int32_t>& holders, int32_t host) { return std::binary_search(holders.begin(), holders.end(), host); }

}  // namespace

void ReductionCutter::cut(const SliceClasses& classes, const Reduction& reduction, double atom_bytes, Shipments& out) {
  place_s_ = incoming_s_;
  PieceCutter cutter(plan_, classes.piecesOf(reduction.slices), out.pieces);
  for (int64_t given = 0; given < reduction.slices.num_bytes;) {
    Atom value = cutAtom(cutter, atom_bytes, reduction.slices.receivers, out);
    value.owner = reduction.slices.sources[0];
    given += value.num_bytes;
    const auto value_index = static_cast<int32_t>(out.atoms.size());
    out.atoms.push_back(value);
    if (way_ == ReductionWay::kStar) {
      addStar(reduction, value_index, out);
    } else {
      addChain(reduction, value_index, out);
    }
    out.most_parts = std::max(out.most_parts, static_cast<int64_t>(out.atoms.size()) - 1 - value_index);
  }
}

/// The contributions that the owner's host does not hold.
std::vector<int32_t> ReductionCutter::lackingOf(const Reduction& reduction) const {
  const std::vector<std::vector<int32_t>>& contributions = hosts_.holders[static_cast<size_t>(reduction.holders)];
  std::vector<int32_t> out;
  for (size_t i = 0; i < contributions.size(); ++i) {
    if (!holdsOne(contributions[i], reduction.slices.sources[0])) {
      out.push_back(static_cast<int32_t>(i));
    }
  }
  return out;
}

void ReductionCutter::addStar(const Reduction& reduction, int32_t value_index, Shipments& out) {
  const int64_t num_bytes = out.atoms[static_cast<size_t>(value_index)].num_bytes;
  for (int32_t contribution : lackingOf(reduction)) {
    const std::vector<int32_t>& holders = hosts_.holders[static_cast<size_t>(reduction.holders)][static_cast<size_t>(contribution)];
    const int32_t host = *std::min_element(holders.begin(), holders.end(), [&](int32_t a, int32_t b) {
      return std::pair(outgoing_s_[static_cast<size_t>(a)], a) < std::pair(outgoing_s_[static_cast<size_t>(b)], b);
    });
    addPart({host, {contribution}}, value_index, num_bytes, out);
  }
}

void ReductionCutter::addChain(const Reduction& reduction, int32_t value_index, Shipments& out) {
  std::vector<Contributor> chain = chainOf(reduction);
  const Atom value = out.atoms[static_cast<size_t>(value_index)];
  const int64_t sum_bytes = accumulatorBytes(plan_, out.piecesOf(value));
  int32_t next = value_index;
  for (size_t k = chain.size(); k-- > 0;) {
    const bool is_sum = k > 0 || chain[k].contributions.size() > 1;
    addPart(std::move(chain[k]), next, is_sum ? sum_bytes : value.num_bytes, out);
    next = static_cast<int32_t>(out.atoms.size()) - 1;
  }
}

/// Hosts that hold all that the owner lacks, each the one with most of what is left, in the order of the chain.
std::vector<ReductionCutter::Contributor> ReductionCutter::chainOf(const Reduction& reduction) const {
  const std::vector<std::vector<int32_t>>& contributions = hosts_.holders[static_cast<size_t>(reduction.holders)];
  std::vector<Contributor> out;
  std::vector<int32_t> left = lackingOf(reduction);
  while (!left.empty()) {
    std::vector<int32_t> num_held(outgoing_s_.size(), 0);
    for (int32_t contribution : left) {
      for (int32_t host : contributions[static_cast<size_t>(contribution)]) {
        ++num_held[static_cast<size_t>(host)];
      }
    }
    int32_t best = 0;
    for (int32_t host = 1; host < network_.numHosts(); ++host) {
      const auto keyOf = [&](int32_t h) { return std::tuple(-num_held[static_cast<size_t>(h)], outgoing_s_[static_cast<size_t>(h)], h); };
      best = keyOf(host) < keyOf(best) ? host : best;
    }
    Contributor& added = out.emplace_back();
    added.host = best;
    std::erase_if(left, [&](int32_t contribution) {
      const bool is_held = holdsOne(contributions[static_cast<size_t>(contribution)], best);
      if (is_held) {
        added.contributions.push_back(contribution);
      }
      return is_held;
    });
  }
  std::stable_sort(out.begin(), out.end(), [&](const Contributor& a, const Contributor& b) {
    return std::pair(-place_s_[static_cast<size_t>(a.host)], a.host) < std::pair(-place_s_[static_cast<size_t>(b.host)], b.host);
  });
  return out;
}

/// Appends the atom that `from` sends to the owner of `next_atom`.
void ReductionCutter::addPart(Contributor from, int32_t next_atom, int64_t num_bytes, Shipments& out) {
  Atom& next = out.atoms[static_cast<size_t>(next_atom)];
  ++next.num_parts;
  next.sources = {};
  Atom atom{.first_piece = next.first_piece, .num_pieces = next.num_pieces, .owner = from.host, .num_bytes = num_bytes};
  atom.sources = out.host_sets.at(out.host_sets.idOf({from.host}));
  atom.receivers = out.host_sets.at(out.host_sets.idOf({next.owner}));
  atom.part = static_cast<int32_t>(out.parts.size());
  outgoing_s_[static_cast<size_t>(from.host)] += seconds(num_bytes, from.host);
  incoming_s_[static_cast<size_t>(next.owner)] += seconds(num_bytes, next.owner);
  out.parts.push_back({next_atom, std::move(from.contributions)});
  out.atoms.push_back(atom);
}

Atom cutAtom(PieceCutter& cutter, double num_bytes, std::span<const int32_t> receivers, const Shipments& out) {
  Atom atom{.first_piece = static_cast<int64_t>(out.pieces.size())};
  atom.num_bytes = cutter.take(num_bytes);
  atom.num_pieces = static_cast<int32_t>(static_cast<int64_t>(out.pieces.size()) - atom.first_piece);
  atom.receivers = receivers;
  return atom;
}

int64_t accumulatorBytes(const ReshardingPlan& plan, std::span<const Piece> pieces) {
  int64_t out = 0;
  for (const Piece& piece : pieces) {
    out += (piece.end - piece.begin) * plan.accumulatorItemBytes(plan.tasks[static_cast<size_t>(piece.task)]);
  }
  return out;
}

}  // namespace xmesh::core
