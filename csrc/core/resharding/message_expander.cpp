#include "core/resharding/message_expander.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace xmesh::core {
namespace {

class MessageExpander {
 public:
  MessageExpander(ReshardingPlan& plan, const Network& network, const Shipments& shipments)
      : plan_(plan), network_(network), shipments_(shipments), hosts_(plan, network), timeline_(plan, network), parts_left_(shipments.atoms.size()) {
    for (size_t i = 0; i < shipments.atoms.size(); ++i) {
      parts_left_[i] = shipments.atoms[i].num_parts;
    }
  }

  void expand(const std::vector<AtomTransfer>& transfers) {
    ready_.reserve(transfers.size());
    at_.reserve(transfers.size());
    for (const AtomTransfer& transfer : transfers) {
      if (shipments_.atoms[static_cast<size_t>(transfer.atom)].value_atom < 0) {
        ship(transfer);
      } else {
        shipContribution(transfer);
      }
    }
    for (size_t i = 0; i < shipments_.atoms.size(); ++i) {
      const Atom& atom = shipments_.atoms[i];
      for (int32_t host : atom.sources) {
        if (atom.value_atom < 0) {
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
  const std::vector<std::vector<int64_t>>& contributionsOf(int32_t task) const {
    return plan_.holders[static_cast<size_t>(plan_.tasks[static_cast<size_t>(task)].holders)].contributions;
  }

  /// A task at a host: the ranks there that matter.
  struct TaskAtHost {
    std::vector<int64_t> chain;  ///< see chainOf
    int64_t holder = -1;         ///< a rank that holds the task's value from the start, or -1
  };

  const TaskAtHost& at(int32_t task, int32_t host) {
    const int64_t key = static_cast<int64_t>(task) * network_.numHosts() + host;
    const auto [place_of, is_new] = at_.try_emplace(key);
    if (is_new) {
      place_of->second.chain = chainOf(task, host);
      const std::vector<std::vector<int64_t>>& contributions = contributionsOf(task);
      const std::vector<int64_t> holders = contributions.size() == 1 ? ranksAt(contributions[0], host) : std::vector<int64_t>{};
      place_of->second.holder = holders.empty() ? -1 : holders[static_cast<size_t>(task) % holders.size()];
    }
    return place_of->second;
  }

  /// The ranks of a table's row that are on a host, ascending.
  std::vector<int64_t> ranksAt(const std::vector<int64_t>& row, int32_t host) {
    std::vector<std::pair<int32_t, int64_t>>& by_host = by_host_[&row];
    if (by_host.empty()) {
      by_host.reserve(row.size());
      for (int64_t rank : row) {
        by_host.emplace_back(network_.hostOfGlobal(rank), rank);
      }
      std::sort(by_host.begin(), by_host.end());
    }
    std::vector<int64_t> out;
    for (auto it = std::lower_bound(by_host.begin(), by_host.end(), std::pair(host, int64_t{-1})); it != by_host.end() && it->first == host; ++it) {
      out.push_back(it->second);
    }
    return out;
  }

  static bool has(const std::vector<int64_t>& ranks, int64_t rank) { return std::binary_search(ranks.begin(), ranks.end(), rank); }

  /// The needers of a task at a host in the order in which they get it there. First the rank that takes it from outside, or the reducing one:
  /// one that holds a contribution if there is one. Tasks take turns.
  std::vector<int64_t> chainOf(int32_t task, int32_t host) {
    std::vector<int64_t> needers = ranksAt(plan_.needers[static_cast<size_t>(plan_.tasks[static_cast<size_t>(task)].needers)], host);
    const std::vector<std::vector<int64_t>>& contributions = contributionsOf(task);
    if (contributions.size() == 1) {
      std::erase_if(needers, [&](int64_t rank) { return has(contributions[0], rank); });
    }
    if (needers.size() > 1) {
      std::rotate(needers.begin(), needers.begin() + task % static_cast<int32_t>(needers.size()), needers.end());
    }
    if (contributions.size() > 1) {
      std::stable_partition(needers.begin(), needers.end(), [&](int64_t rank) {
        return std::any_of(contributions.begin(), contributions.end(), [&](const std::vector<int64_t>& ranks) { return has(ranks, rank); });
      });
    }
    return needers;
  }

  int64_t place(const Piece& piece, int64_t src, int64_t dst, int32_t contribution, int64_t ready) {
    Message message{.task = piece.task, .begin = piece.begin, .end = piece.end};
    message.src_rank = static_cast<int32_t>(src);
    message.dst_rank = static_cast<int32_t>(dst);
    message.contribution = std::max(contribution, 0);
    message.payload = contribution < 0 ? Payload::kValue : Payload::kContribution;
    return timeline_.place(message, ready);
  }

  void passOn(const Piece& piece, int64_t from, const std::vector<int64_t>& chain, size_t next, int64_t ready) {
    for (; next < chain.size(); ++next) {
      ready = place(piece, from, chain[next], -1, ready);
      from = chain[next];
    }
  }

  /// The rank of a host that has the task once it is there.
  int64_t rankWith(int32_t task, int32_t host) {
    const TaskAtHost& here = at(task, host);
    return here.holder >= 0 ? here.holder : here.chain.front();
  }

  int64_t readyKey(int32_t atom, int32_t host) const { return static_cast<int64_t>(atom) * network_.numHosts() + host; }

  /// Whether a host does anything with a piece but hold and send it: some rank there needs it, or contributions are reduced.
  bool concerns(const Piece& piece, int32_t host) const {
    const std::vector<int32_t>& needing = hosts_.needers[static_cast<size_t>(plan_.tasks[static_cast<size_t>(piece.task)].needers)];
    return contributionsOf(piece.task).size() > 1 || std::binary_search(needing.begin(), needing.end(), host);
  }

  /// When a host has an atom. At a source it is made so on the first call: local contributions reduced, local needers served.
  int64_t readyAt(int32_t index, int32_t host) {
    const std::vector<Piece>& pieces = shipments_.atoms[static_cast<size_t>(index)].pieces;
    if (std::none_of(pieces.begin(), pieces.end(), [&](const Piece& piece) { return concerns(piece, host); })) {
      return 0;
    }
    const auto [place_of, is_new] = ready_.try_emplace(readyKey(index, host), 0);
    if (!is_new) {
      return place_of->second;
    }
    int64_t ready = 0;
    for (const Piece& piece : shipments_.atoms[static_cast<size_t>(index)].pieces) {
      const std::vector<int64_t>& chain = at(piece.task, host).chain;
      if (contributionsOf(piece.task).size() == 1) {
        passOn(piece, rankWith(piece.task, host), chain, 0, 0);
        continue;
      }
      const int64_t reduced = gatherLocally(piece, chain.front(), host);
      passOn(piece, chain.front(), chain, 1, reduced);
      ready = std::max(ready, reduced);
    }
    place_of->second = ready;
    return ready;
  }

  /// Brings the contributions that the host's other ranks hold to its reducing rank.
  int64_t gatherLocally(const Piece& piece, int64_t reducer, int32_t host) {
    int64_t ready = 0;
    const std::vector<std::vector<int64_t>>& contributions = contributionsOf(piece.task);
    for (size_t i = 0; i < contributions.size(); ++i) {
      const std::vector<int64_t> holders = ranksAt(contributions[i], host);
      if (!holders.empty() && !has(contributions[i], reducer)) {
        const auto turn = static_cast<size_t>(piece.task) % holders.size();
        ready = std::max(ready, place(piece, holders[turn], reducer, static_cast<int32_t>(i), 0));
      }
    }
    return ready;
  }

  void ship(const AtomTransfer& transfer) {
    const int64_t ready = readyAt(transfer.atom, transfer.src_host);
    int64_t there = 0;
    for (const Piece& piece : shipments_.atoms[static_cast<size_t>(transfer.atom)].pieces) {
      const std::vector<int64_t>& chain = at(piece.task, transfer.dst_host).chain;
      const int64_t arrival = place(piece, rankWith(piece.task, transfer.src_host), chain.front(), -1, ready);
      passOn(piece, chain.front(), chain, 1, arrival);
      there = std::max(there, arrival);
    }
    ready_[readyKey(transfer.atom, transfer.dst_host)] = there;
  }

  void shipContribution(const AtomTransfer& transfer) {
    const Atom& part = shipments_.atoms[static_cast<size_t>(transfer.atom)];
    int64_t& there = parts_there_[part.value_atom];
    for (const Piece& piece : part.pieces) {
      const std::vector<int64_t> holders = ranksAt(contributionsOf(piece.task)[static_cast<size_t>(part.contribution)], transfer.src_host);
      const int64_t reducer = at(piece.task, transfer.dst_host).chain.front();
      there = std::max(there, place(piece, holders[static_cast<size_t>(piece.task) % holders.size()], reducer, part.contribution, 0));
    }
    if (--parts_left_[static_cast<size_t>(part.value_atom)] > 0) {
      return;
    }
    for (const Piece& piece : part.pieces) {
      const std::vector<int64_t>& chain = at(piece.task, transfer.dst_host).chain;
      there = std::max(there, gatherLocally(piece, chain.front(), transfer.dst_host));
    }
    for (const Piece& piece : part.pieces) {
      const std::vector<int64_t>& chain = at(piece.task, transfer.dst_host).chain;
      passOn(piece, chain.front(), chain, 1, there);
    }
    ready_[readyKey(part.value_atom, transfer.dst_host)] = there;
  }

  ReshardingPlan& plan_;
  const Network& network_;
  const Shipments& shipments_;
  HostSets hosts_;
  Timeline timeline_;
  std::vector<int32_t> parts_left_;
  std::unordered_map<int32_t, int64_t> parts_there_;  ///< when the last contribution so far is there, by value atom
  std::unordered_map<int64_t, int64_t> ready_;        ///< by atom and host
  std::unordered_map<int64_t, TaskAtHost> at_;        ///< by task and host
  std::unordered_map<const std::vector<int64_t>*, std::vector<std::pair<int32_t, int64_t>>> by_host_;  ///< (host, rank) by row of the plan's tables
};

}  // namespace

void expandTransfers(ReshardingPlan& plan, const Network& network, const Shipments& shipments, const std::vector<AtomTransfer>& transfers) {
  MessageExpander(plan, network, shipments).expand(transfers);
}

}  // namespace xmesh::core
