#include "core/resharding/shipments.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "core/resharding/chunking.h"
#include "core/resharding/water_fill.h"

namespace xmesh::core {
namespace {

using Hosts = std::vector<int32_t>;

bool has(const Hosts& hosts, int32_t host) { return std::binary_search(hosts.begin(), hosts.end(), host); }

Hosts without(const Hosts& hosts, const Hosts& others) {
  Hosts out;
  std::set_difference(hosts.begin(), hosts.end(), others.begin(), others.end(), std::back_inserter(out));
  return out;
}

/// Pieces that go from the same hosts to the same hosts.
struct SliceClass {
  Hosts sources;
  Hosts receivers;
  std::vector<Piece> pieces;
  int64_t num_bytes = 0;
};

/// Walks a list of pieces from its front.
class PieceCutter {
 public:
  PieceCutter(const ReshardingPlan& plan, const std::vector<Piece>& pieces) : plan_(plan), pieces_(pieces) {}

  /// About `num_bytes` more, whole elements, at least one; empty at the end.
  std::vector<Piece> take(double num_bytes, int64_t& taken_bytes) {
    std::vector<Piece> out;
    taken_bytes = 0;
    while (index_ < pieces_.size()) {
      const Piece& piece = pieces_[index_];
      const int64_t item_bytes = plan_.itemBytes(plan_.tasks[static_cast<size_t>(piece.task)]);
      const int64_t wanted = std::llround((num_bytes - static_cast<double>(taken_bytes)) / static_cast<double>(item_bytes));
      const int64_t begin = piece.begin + offset_;
      const int64_t end = std::min(piece.end, begin + std::max<int64_t>(wanted, out.empty() ? 1 : 0));
      if (end == begin) {
        break;
      }
      out.push_back({piece.task, begin, end});
      taken_bytes += (end - begin) * item_bytes;
      offset_ = end - piece.begin;
      if (end == piece.end) {
        ++index_;
        offset_ = 0;
      }
    }
    return out;
  }

 private:
  const ReshardingPlan& plan_;
  const std::vector<Piece>& pieces_;
  size_t index_ = 0;
  int64_t offset_ = 0;
};

/// Names the hosts that pass a class on, in turn, each as often as its share of the further copies says.
class RelayTurns {
 public:
  RelayTurns(int32_t block, const std::vector<MassBlock>& blocks, const FilledBlocks& filled) {
    if (block >= 0) {
      hosts_ = blocks[static_cast<size_t>(block)].hosts;
      shares_ = filled.bytes[static_cast<size_t>(block)];
      credit_.assign(hosts_.size(), 0);
      mass_ = static_cast<double>(blocks[static_cast<size_t>(block)].mass);
    }
  }

  /// -1 where no receiver's turn has come.
  int32_t next(const Hosts& receivers) {
    if (hosts_.empty()) {
      return -1;
    }
    size_t best = 0;
    for (size_t k = 0; k < hosts_.size(); ++k) {
      credit_[k] += shares_[k] / mass_;
      best = credit_[k] > credit_[best] + 1e-9 ? k : best;
    }
    credit_[best] -= 1;
    return has(receivers, hosts_[best]) ? hosts_[best] : -1;
  }

 private:
  Hosts hosts_;
  std::vector<double> shares_;
  std::vector<double> credit_;
  double mass_ = 1;
};

class ShipmentBuilder {
 public:
  ShipmentBuilder(const ReshardingPlan& plan, const Network& network, bool has_few_owners)
      : plan_(plan), hosts_(plan, network), has_few_owners_(has_few_owners) {
    for (int32_t host = 0; host < network.numHosts(); ++host) {
      rates_.push_back(network.nicBytesPerS(host));
    }
  }

  Shipments build(int64_t num_chunks) {
    collect();
    fill();
    chooseChunk(num_chunks);
    for (size_t i = 0; i < classes_.size(); ++i) {
      cut(classes_[i], filled_.bytes[i], RelayTurns(spread_block_[i], blocks_, filled_));
    }
    for (const Reduction& reduction : reductions_) {
      cut(reduction);
    }
    countMessages();
    return std::move(out_);
  }

 private:
  /// A Partial class on its way to one reducing host.
  struct Reduction {
    SliceClass slices;  ///< sources: the reducing host; receivers: the others
    int64_t holders = 0;
  };

  int64_t bytesOf(const std::vector<Piece>& pieces) const {
    int64_t out = 0;
    for (const Piece& piece : pieces) {
      out += (piece.end - piece.begin) * plan_.itemBytes(plan_.tasks[static_cast<size_t>(piece.task)]);
    }
    return out;
  }

  void collect() {
    std::map<std::pair<Hosts, Hosts>, size_t> class_of;
    std::unordered_map<int64_t, size_t> class_of_tables;      // by holders and needers of the plan's tables
    std::map<std::pair<int64_t, Hosts>, SliceClass> partial;  // by holders and needing hosts
    for (size_t task = 0; task < plan_.tasks.size(); ++task) {
      const UnitTask& unit = plan_.tasks[task];
      const Piece piece{static_cast<int32_t>(task), 0, numElements(unit.box)};
      const int64_t tables = unit.holders * static_cast<int64_t>(plan_.needers.size()) + unit.needers;
      const auto [known, is_new_tables] = class_of_tables.try_emplace(tables, size_t{0});
      if (!is_new_tables) {
        classes_[known->second].pieces.push_back(piece);
        classes_[known->second].num_bytes += bytesOf({piece});
        continue;
      }
      const std::vector<Hosts>& holders = hosts_.holders[static_cast<size_t>(unit.holders)];
      const Hosts& needers = hosts_.needers[static_cast<size_t>(unit.needers)];
      Hosts sources = holders.front();
      if (holders.size() > 1) {  // needing hosts where every contribution is at hand
        sources = needers;
        std::erase_if(sources,
                      [&](int32_t host) { return !std::all_of(holders.begin(), holders.end(), [&](const Hosts& h) { return has(h, host); }); });
      }
      Hosts receivers = without(needers, sources);
      SliceClass* slices = nullptr;
      if (sources.empty()) {
        class_of_tables.erase(known);
        slices = &partial[{unit.holders, needers}];
      } else {
        const auto [place, is_new] = class_of.try_emplace({sources, receivers}, classes_.size());
        if (is_new) {
          classes_.push_back({std::move(sources), std::move(receivers), {}, 0});
        }
        known->second = place->second;
        slices = &classes_[place->second];
      }
      slices->pieces.push_back(piece);
      slices->num_bytes += bytesOf({piece});
    }
    for (const auto& [key, slices] : partial) {
      stripeOverReducers(key.first, key.second, slices);
    }
  }

  /// A needing host that lacks l contributions and reduces the share x receives (l - 1) x more than the slice itself: equal for all at x ~ 1 / (l -
  /// 1). Hosts that lack one reduce at no cost and share all between them.
  void stripeOverReducers(int64_t holders, const Hosts& needers, const SliceClass& slices) {
    const std::vector<Hosts>& contributions = hosts_.holders[static_cast<size_t>(holders)];
    std::vector<double> weights;
    bool any_free = false;
    for (int32_t host : needers) {
      const auto lacking = std::count_if(contributions.begin(), contributions.end(), [&](const Hosts& h) { return !has(h, host); });
      any_free = any_free || lacking == 1;
      weights.push_back(lacking > 1 ? 1.0 / static_cast<double>(lacking - 1) : 0);
    }
    double total = 0;
    for (double& weight : weights) {
      weight = any_free ? (weight == 0 ? 1 : 0) : weight;
      total += weight;
    }
    PieceCutter cutter(plan_, slices.pieces);
    int64_t given = 0;
    double passed = 0;
    for (size_t i = 0; i < needers.size(); ++i) {
      passed += weights[i];
      const double target = std::round(static_cast<double>(slices.num_bytes) * (passed / total)) - static_cast<double>(given);
      if (weights[i] == 0 || target < 1) {
        continue;
      }
      Reduction reduction{{{needers[i]}, without(needers, {needers[i]}), {}, 0}, holders};
      reduction.slices.pieces = cutter.take(target, reduction.slices.num_bytes);
      given += reduction.slices.num_bytes;
      if (!reduction.slices.pieces.empty()) {
        reductions_.push_back(std::move(reduction));
      }
    }
  }

  /// First copies over the holders, further copies over holders and needers alike, contributions over their holders.
  void fill() {
    std::vector<MassBlock> blocks;
    std::vector<MassBlock> more;
    std::vector<int64_t> incoming(rates_.size(), 0);
    const auto addSpread = [&](const SliceClass& slices) {
      for (int32_t host : slices.receivers) {
        incoming[static_cast<size_t>(host)] += slices.num_bytes;
      }
      if (slices.receivers.size() > 1) {
        Hosts all;
        std::set_union(slices.sources.begin(), slices.sources.end(), slices.receivers.begin(), slices.receivers.end(), std::back_inserter(all));
        spread_block_.push_back(static_cast<int32_t>(more.size()));
        more.push_back({all, slices.num_bytes * static_cast<int64_t>(slices.receivers.size() - 1)});
      } else {
        spread_block_.push_back(-1);
      }
      out_.largest_fan = std::max(out_.largest_fan, static_cast<int64_t>(slices.receivers.size()));
    };
    for (const SliceClass& slices : classes_) {
      blocks.push_back({slices.sources, slices.receivers.empty() ? 0 : slices.num_bytes});
      addSpread(slices);
    }
    for (const Reduction& reduction : reductions_) {
      addSpread(reduction.slices);
      more.push_back({reduction.slices.sources, reduction.slices.receivers.empty() ? 0 : reduction.slices.num_bytes});
      for (const Hosts& holders : hosts_.holders[static_cast<size_t>(reduction.holders)]) {
        if (!has(holders, reduction.slices.sources[0])) {
          more.push_back({holders, reduction.slices.num_bytes});
          incoming[static_cast<size_t>(reduction.slices.sources[0])] += reduction.slices.num_bytes;
        }
      }
    }
    for (int32_t& block : spread_block_) {
      block += block >= 0 ? static_cast<int32_t>(blocks.size()) : 0;
    }
    blocks.insert(blocks.end(), more.begin(), more.end());
    blocks_ = blocks;
    double bound_s = plan_.lower_bound_seconds;
    for (size_t host = 0; host < rates_.size(); ++host) {
      bound_s = std::max(bound_s, static_cast<double>(incoming[host]) / static_cast<double>(rates_[host]));
    }
    filled_ = waterFill(blocks, rates_, bound_s);
    out_.bottleneck_s = std::max(bound_s, filled_.largest_load_s);
    if (has_few_owners_) {
      concentrate();
    }
  }

  /// Replaces the levelled shares by those of a maximum flow, which fills one host after the other.
  void concentrate() {
    constexpr int64_t kRate = 1'000'000;
    const auto mass = static_cast<int64_t>(std::ceil(out_.bottleneck_s * (1 + 1e-6) * static_cast<double>(kRate)));
    const std::vector<std::vector<int64_t>> split = splitWithin(blocks_, rates_, {mass, kRate});
    for (size_t i = 0; i < split.size(); ++i) {
      filled_.bytes[i].assign(split[i].begin(), split[i].end());
    }
  }

  /// T (1 + d/K) + K o is least at K = sqrt(d T / o), d being the depth of the trees. Where that makes many messages (a plan is made of one
  /// per chunk and needing rank), fewer, but not below kEnoughChunks.
  void chooseChunk(int64_t num_chunks) {
    constexpr int64_t kFewestChunks = 8;
    constexpr int64_t kEnoughChunks = 64;
    constexpr double kManyMessages = 32'768;
    if (num_chunks == 0) {
      const double depth = 1.0 + std::bit_width(static_cast<uint64_t>(out_.largest_fan));
      const double message_s = 1e-6 * std::max(0.1, plan_.topology.links().message_us);
      num_chunks = std::clamp<int64_t>(std::llround(std::sqrt(depth * out_.bottleneck_s / message_s)), kFewestChunks, kMaxPipelineChunks);
      const double bottleneck_bytes = out_.bottleneck_s * static_cast<double>(*std::max_element(rates_.begin(), rates_.end()));
      double num_bytes = 0;
      for (const UnitTask& task : plan_.tasks) {
        num_bytes += static_cast<double>(numElements(task.box) * plan_.itemBytes(task)) *
                     static_cast<double>(plan_.needers[static_cast<size_t>(task.needers)].size());
      }
      const double most = bottleneck_bytes > 0 ? kManyMessages * bottleneck_bytes / num_bytes : 0;
      num_chunks = std::min(num_chunks, std::max(kEnoughChunks, static_cast<int64_t>(std::min(most, 1e6))));
    }
    const auto slowest = static_cast<double>(*std::min_element(rates_.begin(), rates_.end()));
    const double bytes = std::ceil(out_.bottleneck_s * slowest / static_cast<double>(num_chunks));
    out_.num_chunks = static_cast<double>(num_chunks);
    out_.chunk_bytes = bytes > 0 ? std::clamp<int64_t>(static_cast<int64_t>(bytes), 1, kMaxChunkBytes) : kMaxChunkBytes;
  }

  void countMessages() {
    std::vector<int64_t> sent(rates_.size(), 0);
    std::vector<int64_t> received(rates_.size(), 0);
    for (const Atom& atom : out_.atoms) {
      const auto num_pieces = static_cast<int64_t>(atom.pieces.size());
      sent[static_cast<size_t>(atom.owner)] += atom.receivers.empty() ? 0 : num_pieces;
      for (int32_t host : atom.receivers) {
        received[static_cast<size_t>(host)] += num_pieces;
      }
    }
    for (size_t host = 0; host < rates_.size(); ++host) {
      out_.most_messages = std::max({out_.most_messages, sent[host], received[host]});
    }
  }

  /// Bytes of each of the fewest atoms of at most about a chunk, all alike but the last, so that ports fall free together; whole elements of any
  /// type.
  static double equalAtomBytes(double num_bytes, double chunk_bytes) {
    constexpr double kLongestItem = 16;
    const double num_atoms = std::max(1.0, std::ceil(num_bytes / chunk_bytes - 1e-6));
    return std::ceil(num_bytes / num_atoms / kLongestItem) * kLongestItem;
  }

  /// More holders than chunks, and nothing else to balance: the holders that owe a first copy are spread evenly.
  void cutOncePerChunk(const SliceClass& slices, RelayTurns relays) {
    PieceCutter cutter(plan_, slices.pieces);
    const auto num_bytes = static_cast<double>(slices.num_bytes);
    const double atom_bytes = equalAtomBytes(num_bytes, static_cast<double>(out_.chunk_bytes));
    const auto num_sources = static_cast<double>(slices.sources.size());
    for (int64_t given = 0; given < slices.num_bytes;) {
      const auto k = static_cast<size_t>(static_cast<double>(given) / num_bytes * num_sources);
      int64_t taken = 0;
      Atom atom{.pieces = cutter.take(atom_bytes, taken), .num_bytes = taken, .owner = slices.sources[std::min(k, slices.sources.size() - 1)]};
      atom.sources = slices.sources;
      atom.receivers = slices.receivers;
      atom.relay = relays.next(slices.receivers);
      given += taken;
      out_.atoms.push_back(std::move(atom));
    }
  }

  void cut(const SliceClass& slices, const std::vector<double>& shares, RelayTurns relays) {
    PieceCutter cutter(plan_, slices.pieces);
    const auto chunk_bytes = static_cast<double>(slices.receivers.empty() ? kMaxChunkBytes : out_.chunk_bytes);
    double owed = 0;
    int64_t given = 0;
    if (classes_.size() == 1 && static_cast<double>(slices.sources.size()) * chunk_bytes > static_cast<double>(slices.num_bytes)) {
      cutOncePerChunk(slices, relays);
      return;
    }
    for (size_t k = 0; k < slices.sources.size(); ++k) {
      owed += shares[k];
      const double target = k + 1 == slices.sources.size() ? static_cast<double>(slices.num_bytes) : owed;
      const double stripe = target - static_cast<double>(given);
      const double atom_bytes = equalAtomBytes(stripe, chunk_bytes);
      while (target - static_cast<double>(given) >= 1 && given < slices.num_bytes) {
        int64_t taken = 0;
        Atom atom{
            .pieces = cutter.take(std::min(atom_bytes, target - static_cast<double>(given)), taken), .num_bytes = taken, .owner = slices.sources[k]};
        atom.sources = slices.sources;
        atom.receivers = slices.receivers;
        atom.relay = relays.next(slices.receivers);
        given += taken;
        out_.atoms.push_back(std::move(atom));
      }
    }
  }

  void cut(const Reduction& reduction) {
    const std::vector<Hosts>& contributions = hosts_.holders[static_cast<size_t>(reduction.holders)];
    const int32_t reducer = reduction.slices.sources[0];
    PieceCutter cutter(plan_, reduction.slices.pieces);
    const double atom_bytes = equalAtomBytes(static_cast<double>(reduction.slices.num_bytes), static_cast<double>(out_.chunk_bytes));
    for (int64_t given = 0; given < reduction.slices.num_bytes;) {
      int64_t taken = 0;
      Atom value{.pieces = cutter.take(atom_bytes, taken), .num_bytes = taken, .owner = reducer};
      given += taken;
      value.receivers = reduction.slices.receivers;
      const auto value_index = static_cast<int32_t>(out_.atoms.size());
      out_.atoms.push_back(value);
      for (size_t i = 0; i < contributions.size(); ++i) {
        if (has(contributions[i], reducer)) {
          continue;
        }
        Atom part = value;
        part.owner = *std::min_element(contributions[i].begin(), contributions[i].end(),
                                       [&](int32_t a, int32_t b) { return std::pair(contributed_[a], a) < std::pair(contributed_[b], b); });
        contributed_[part.owner] += static_cast<double>(taken) / static_cast<double>(rates_[static_cast<size_t>(part.owner)]);
        part.sources = {part.owner};
        part.receivers = {reducer};
        part.contribution = static_cast<int32_t>(i);
        part.value_atom = value_index;
        out_.atoms.push_back(std::move(part));
        ++out_.atoms[static_cast<size_t>(value_index)].num_parts;
      }
    }
  }

  const ReshardingPlan& plan_;
  HostSets hosts_;
  bool has_few_owners_;
  std::vector<int64_t> rates_;
  std::vector<SliceClass> classes_;
  std::vector<Reduction> reductions_;
  std::vector<int32_t> spread_block_;  ///< by class: the block of its further copies, or -1
  std::vector<MassBlock> blocks_;
  FilledBlocks filled_;
  std::map<int32_t, double> contributed_;  ///< seconds of contributions by sending host
  Shipments out_;
};

}  // namespace

Shipments shipmentsOf(const ReshardingPlan& plan, const Network& network, int64_t num_chunks, bool has_few_owners) {
  return ShipmentBuilder(plan, network, has_few_owners).build(num_chunks);
}

}  // namespace xmesh::core
