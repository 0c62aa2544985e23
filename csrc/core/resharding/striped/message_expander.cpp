#include "core/resharding/striped/message_expander.h"

#include <algorithm>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/resharding/host_sets.h"
#include "core/resharding/striped/ranks_by_host.h"

namespace xmesh::core {
namespace {

using Ranks = std::vector<int64_t>;

bool has(std::span<const int64_t> ranks, int64_t rank) { return std::binary_search(ranks.begin(), ranks.end(), rank); }

class MessageExpander {
 public:
  MessageExpander(ReshardingPlan& plan, const Network& network, const Shipments& shipments)
      : plan_(plan),
        network_(network),
        shipments_(shipments),
        hosts_(plan, network),
        needers_(network),
        holders_(network),
        timeline_(plan, network),
        parts_left_(shipments.atoms.size()),
        first_slot_(shipments.atoms.size()) {
    hops_.reserve(shipments.atoms.size());
    for (const Ranks& ranks : plan.needers) {
      needers_.addRow(ranks);
    }
    int64_t num_rows = 0;
    for (const Holders& of_slice : plan.holders) {
      first_holder_row_.push_back(num_rows);
      num_rows += static_cast<int64_t>(of_slice.contributions.size());
      for (const Ranks& ranks : of_slice.contributions) {
        holders_.addRow(ranks);
      }
    }
    size_t num_slots = 0;
    for (size_t i = 0; i < shipments.atoms.size(); ++i) {
      const Atom& atom = shipments.atoms[i];
      parts_left_[i] = atom.num_parts;
      first_slot_[i] = num_slots;
      hops_.push_back(onlyHop(atom));
      num_slots += hops_.back().from < 0 ? 1 + atom.sources.size() + atom.receivers.size() : 0;
    }
    ready_.assign(num_slots, kUnknown);
  }

  void expand(const std::vector<AtomTransfer>& transfers) {
    timeline_.reserve(transfers.size());
    for (size_t i = 0; i < transfers.size(); ++i) {
      const AtomTransfer& transfer = transfers[i];
      fetchAhead(transfers, i);
      if (shipments_.atoms[static_cast<size_t>(transfer.atom)].part < 0) {
        ship(transfer);
      } else {
        shipPart(transfer);
      }
    }
    for (size_t i = 0; i < shipments_.atoms.size(); ++i) {
      if (hops_[i].from >= 0) {
        continue;
      }
      const Atom& atom = shipments_.atoms[i];
      for (int32_t host : atom.sources) {
        if (atom.part < 0) {
          readyAt(static_cast<int32_t>(i), host);
        }
      }
      if (atom.num_parts == 0 && atom.sources.empty()) {
        readyAt(static_cast<int32_t>(i), atom.owner);
      }
    }
    timeline_.finish();
  }

 private:
  static constexpr int64_t kUnknown = -1;

  /// All that becomes of an atom that is one piece and moves from one rank to one rank; else from == -1.
  struct Hop {
    int32_t from = -1;
    int32_t to = -1;
  };

  Hop onlyHop(const Atom& atom) {
    if (atom.num_pieces != 1 || atom.sources.size() != 1 || atom.receivers.size() != 1) {
      return {};
    }
    const Piece& piece = shipments_.piecesOf(atom)[0];
    if (concerns(piece, atom.owner)) {
      return {};
    }
    const Ranks& chain = chainAt(piece.task, atom.receivers[0]);
    if (chain.size() != 1) {
      return {};
    }
    const auto to = static_cast<int32_t>(chain.front());
    return {static_cast<int32_t>(rankWith(piece.task, atom.owner)), to};
  }

  /// Transfers refer to atoms far from each other: has the memory of the next ones brought near, each step when the one before has come.
  void fetchAhead(const std::vector<AtomTransfer>& transfers, size_t i) const {
    constexpr size_t kStep = 6;
    if (i + 3 * kStep < transfers.size()) {
      __builtin_prefetch(&shipments_.atoms[static_cast<size_t>(transfers[i + 3 * kStep].atom)]);
      __builtin_prefetch(&shipments_.pieces[firstPiece(transfers[i + 2 * kStep])]);
      const auto task = static_cast<size_t>(shipments_.pieces[firstPiece(transfers[i + kStep])].task);
      __builtin_prefetch(&plan_.tasks[task]);
      __builtin_prefetch(&hops_[static_cast<size_t>(transfers[i + kStep].atom)]);
    }
  }
  size_t firstPiece(const AtomTransfer& transfer) const {
    return static_cast<size_t>(shipments_.atoms[static_cast<size_t>(transfer.atom)].first_piece);
  }

  const UnitTask& unit(int32_t task) const { return plan_.tasks[static_cast<size_t>(task)]; }
  const std::vector<Ranks>& contributionsOf(int32_t task) const { return plan_.holders[static_cast<size_t>(unit(task).holders)].contributions; }

  /// The ranks of a host that hold a contribution to a task.
  std::span<const int64_t> holdersAt(int32_t task, size_t contribution, int32_t host) const {
    return holders_.at(first_holder_row_[static_cast<size_t>(unit(task).holders)] + static_cast<int64_t>(contribution), host);
  }

  /// The needers of a task at a host in the order in which they get it there. First the rank that takes it from outside, or the reducing one:
  /// one that holds a contribution if there is one. Tasks take turns.
  void findChain(int32_t task, int32_t host, Ranks& chain) const {
    const std::span<const int64_t> needers = needers_.at(unit(task).needers, host);
    chain.assign(needers.begin(), needers.end());
    const std::vector<Ranks>& contributions = contributionsOf(task);
    if (contributions.size() == 1) {
      const std::span<const int64_t> holders = holdersAt(task, 0, host);
      std::erase_if(chain, [&](int64_t rank) { return has(holders, rank); });
    }
    if (chain.size() > 1) {
      std::rotate(chain.begin(), chain.begin() + task % static_cast<int32_t>(chain.size()), chain.end());
    }
    if (contributions.size() > 1) {
      std::stable_partition(chain.begin(), chain.end(), [&](int64_t rank) {
        return std::any_of(contributions.begin(), contributions.end(), [&](const Ranks& ranks) { return has(ranks, rank); });
      });
    }
  }

  /// The chain of a task at a host. Valid until the next call: those of slices with one contribution are found anew, which costs no more than
  /// their messages.
  const Ranks& chainAt(int32_t task, int32_t host) {
    if (contributionsOf(task).size() == 1) {
      findChain(task, host, chain_);
      return chain_;
    }
    const auto [place_of, is_new] = partial_chains_.try_emplace(static_cast<int64_t>(task) * network_.numHosts() + host);
    if (is_new) {
      findChain(task, host, place_of->second);
    }
    return place_of->second;
  }

  /// `carried` tells payload and contribution.
  int64_t place(const Piece& piece, int64_t src, int64_t dst, Message carried, int64_t ready) {
    carried.task = piece.task;
    carried.begin = piece.begin;
    carried.end = piece.end;
    carried.src_rank = static_cast<int32_t>(src);
    carried.dst_rank = static_cast<int32_t>(dst);
    return timeline_.place(carried, ready);
  }
  static Message contributionMessage(int32_t contribution) { return {.contribution = contribution, .payload = Payload::kContribution}; }

  /// From rank `from` along the chain, beginning with its rank number `next`; returns when that one has it.
  int64_t passOn(const Piece& piece, int64_t from, const Ranks& chain, size_t next, int64_t ready) {
    int64_t with_next = ready;
    for (size_t i = next; i < chain.size(); ++i) {
      ready = place(piece, from, chain[i], {}, ready);
      with_next = i == next ? ready : with_next;
      from = chain[i];
    }
    return with_next;
  }

  /// The rank of a host that has the task once it is there.
  int64_t rankWith(int32_t task, int32_t host) {
    if (contributionsOf(task).size() == 1) {
      const std::span<const int64_t> holders = holdersAt(task, 0, host);
      if (!holders.empty()) {
        return holders[static_cast<size_t>(task) % holders.size()];
      }
    }
    return chainAt(task, host).front();
  }

  /// The rank from which a task leaves a host. Where no rank that holds it needs it, what goes to several hosts leaves from a needer, as what is
  /// passed on leaves a receiver: so each two hosts have few connections of even load, and nothing waits to be passed on behind the slowest of many.
  int64_t senderOf(const Atom& atom, int32_t task, int32_t host) {
    if (atom.receivers.size() > 1 && contributionsOf(task).size() == 1) {
      const Ranks& chain = chainAt(task, host);
      if (!chain.empty() && chain.size() == needers_.at(unit(task).needers, host).size()) {
        return chain.front();
      }
    }
    return rankWith(task, host);
  }

  /// When a host has an atom, kUnknown while that is not settled.
  int64_t& ready(int32_t index, int32_t host) {
    const Atom& atom = shipments_.atoms[static_cast<size_t>(index)];
    const size_t first = first_slot_[static_cast<size_t>(index)];
    size_t slot = 1;
    for (const std::span<const int32_t> hosts : {atom.sources, atom.receivers}) {
      const auto found = std::lower_bound(hosts.begin(), hosts.end(), host);
      if (found != hosts.end() && *found == host) {
        return ready_[first + slot + static_cast<size_t>(found - hosts.begin())];
      }
      slot += hosts.size();
    }
    return ready_[first];  // of a reduced value: its owner
  }

  /// Whether a host does anything with a piece but hold and send it: some rank there needs it, or contributions are reduced.
  bool concerns(const Piece& piece, int32_t host) const {
    const std::vector<int32_t>& needing = hosts_.needers[static_cast<size_t>(unit(piece.task).needers)];
    return contributionsOf(piece.task).size() > 1 || std::binary_search(needing.begin(), needing.end(), host);
  }

  /// When a host has an atom. At a source it is made so on the first call: local contributions reduced, local needers served.
  int64_t readyAt(int32_t index, int32_t host) {
    const Atom& atom = shipments_.atoms[static_cast<size_t>(index)];
    const std::span<const Piece> pieces = shipments_.piecesOf(atom);
    if (std::none_of(pieces.begin(), pieces.end(), [&](const Piece& piece) { return concerns(piece, host); })) {
      return 0;
    }
    int64_t& settled = ready(index, host);
    if (settled != kUnknown) {
      return settled;
    }
    settled = 0;
    for (const Piece& piece : pieces) {
      if (contributionsOf(piece.task).size() == 1) {
        const int64_t with_first = passOn(piece, rankWith(piece.task, host), chainAt(piece.task, host), 0, 0);
        settled = std::max(settled, has(contributionsOf(piece.task)[0], senderOf(atom, piece.task, host)) ? 0 : with_first);
        continue;
      }
      const Ranks& chain = chainAt(piece.task, host);
      const int64_t reduced = gatherLocally(piece, chain.front(), host);
      passOn(piece, chain.front(), chain, 1, reduced);
      settled = std::max(settled, reduced);
    }
    return settled;
  }

  /// Brings the contributions that the host's other ranks hold to its reducing rank.
  int64_t gatherLocally(const Piece& piece, int64_t reducer, int32_t host) {
    int64_t ready = 0;
    const std::vector<Ranks>& contributions = contributionsOf(piece.task);
    for (size_t i = 0; i < contributions.size(); ++i) {
      const std::span<const int64_t> holders = holdersAt(piece.task, i, host);
      if (!holders.empty() && !has(contributions[i], reducer)) {
        const auto turn = static_cast<size_t>(piece.task) % holders.size();
        ready = std::max(ready, place(piece, holders[turn], reducer, contributionMessage(static_cast<int32_t>(i)), 0));
      }
    }
    return ready;
  }

  void ship(const AtomTransfer& transfer) {
    const Atom& atom = shipments_.atoms[static_cast<size_t>(transfer.atom)];
    const Hop& hop = hops_[static_cast<size_t>(transfer.atom)];
    if (hop.from >= 0) {
      place(shipments_.piecesOf(atom)[0], hop.from, hop.to, {}, 0);
      return;
    }
    const int64_t since = readyAt(transfer.atom, transfer.src_host);
    int64_t there = 0;
    for (const Piece& piece : shipments_.piecesOf(atom)) {
      const int64_t from = senderOf(atom, piece.task, transfer.src_host);
      const Ranks& chain = chainAt(piece.task, transfer.dst_host);
      const int64_t arrival = place(piece, from, chain.front(), {}, since);
      passOn(piece, chain.front(), chain, 1, arrival);
      there = std::max(there, arrival);
    }
    ready(transfer.atom, transfer.dst_host) = there;
  }

  const Part& partOf(int32_t atom) const { return shipments_.parts[static_cast<size_t>(shipments_.atoms[static_cast<size_t>(atom)].part)]; }

  /// The rank of a host that adds up a part: one that holds one of its contributions. Tasks take turns.
  int64_t addingRank(const Part& part, int32_t task, int32_t host) const {
    const size_t count = part.contributions.size();
    const auto turn = static_cast<size_t>(task);
    const std::span<const int64_t> holders = holdersAt(task, static_cast<size_t>(part.contributions[turn % count]), host);
    return holders[turn / count % holders.size()];
  }

  /// Brings a part's contributions that other ranks of the host hold to the rank that adds them up.
  int64_t gatherPart(const Part& part, const Piece& piece, int64_t adder, int32_t host) {
    int64_t ready = 0;
    for (int32_t contribution : part.contributions) {
      const std::span<const int64_t> holders = holdersAt(piece.task, static_cast<size_t>(contribution), host);
      if (!has(holders, adder)) {
        ready = std::max(ready, place(piece, holders[static_cast<size_t>(piece.task) % holders.size()], adder, contributionMessage(contribution), 0));
      }
    }
    return ready;
  }

  void shipPart(const AtomTransfer& transfer) {
    const Atom& atom = shipments_.atoms[static_cast<size_t>(transfer.atom)];
    const Part& part = partOf(transfer.atom);
    const bool is_last = shipments_.atoms[static_cast<size_t>(part.next_atom)].part < 0;
    const int64_t since = atom.num_parts > 0 ? parts_there_.at(transfer.atom) : 0;
    const bool is_sum = atom.num_parts > 0 || part.contributions.size() > 1;
    const Message carried = is_sum ? Message{.payload = Payload::kPartialSum} : contributionMessage(part.contributions.front());
    int64_t& there = parts_there_[part.next_atom];
    for (const Piece& piece : shipments_.piecesOf(atom)) {
      const int64_t from = addingRank(part, piece.task, transfer.src_host);
      const int64_t to = is_last ? chainAt(piece.task, transfer.dst_host).front() : addingRank(partOf(part.next_atom), piece.task, transfer.dst_host);
      const int64_t ready = std::max(since, gatherPart(part, piece, from, transfer.src_host));
      there = std::max(there, place(piece, from, to, carried, ready));
    }
    if (--parts_left_[static_cast<size_t>(part.next_atom)] == 0 && is_last) {
      finishValue(part.next_atom, transfer.dst_host, there);
    }
  }

  /// The parts of a value are with its owner from `there` on.
  void finishValue(int32_t value_atom, int32_t host, int64_t there) {
    const std::span<const Piece> pieces = shipments_.piecesOf(shipments_.atoms[static_cast<size_t>(value_atom)]);
    for (const Piece& piece : pieces) {
      there = std::max(there, gatherLocally(piece, chainAt(piece.task, host).front(), host));
    }
    for (const Piece& piece : pieces) {
      const Ranks& chain = chainAt(piece.task, host);
      passOn(piece, chain.front(), chain, 1, there);
    }
    ready(value_atom, host) = there;
  }

  ReshardingPlan& plan_;
  const Network& network_;
  const Shipments& shipments_;
  HostSets hosts_;
  RanksByHost needers_;                    ///< by row of the plan's table
  RanksByHost holders_;                    ///< by contribution, those of one row of the plan's table together
  std::vector<int64_t> first_holder_row_;  ///< by row of the plan's table
  Timeline timeline_;
  std::vector<int32_t> parts_left_;
  std::unordered_map<int32_t, int64_t> parts_there_;  ///< when the last part so far is there, by the atom that it becomes part of
  std::vector<Hop> hops_;                             ///< by atom
  std::vector<size_t> first_slot_;                    ///< by atom: where its times in ready_ begin: its owner's, its sources', its receivers'
  std::vector<int64_t> ready_;
  std::unordered_map<int64_t, Ranks> partial_chains_;  ///< by task and host
  Ranks chain_;
};

}  // namespace

void expandTransfers(ReshardingPlan& plan, const Network& network, const Shipments& shipments, const std::vector<AtomTransfer>& transfers) {
  MessageExpander(plan, network, shipments).expand(transfers);
}

}  // namespace xmesh::core
