#include "core/resharding/striped/cut.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <utility>

#include "core/resharding/chunking.h"
#include "core/resharding/striped/range_cutter.h"
#include "core/resharding/striped/reduction_cutter.h"
#include "core/resharding/striped/slice_classes.h"
#include "core/resharding/striped/water_fill.h"

namespace xmesh::core {
namespace {

using Hosts = std::vector<int32_t>;
using HostSpan = std::span<const int32_t>;

bool has(HostSpan hosts, int32_t host) { return std::binary_search(hosts.begin(), hosts.end(), host); }

/// Names the hosts that pass a class on, in turn, each as often as its share of the further copies says.
class RelayRotation {
 public:
  RelayRotation(int32_t shared, const std::vector<SharedLoad>& shared_loads, const FilledLoads& filled) {
    if (shared >= 0) {
      hosts_ = shared_loads[static_cast<size_t>(shared)].hosts;
      shares_ = filled.bytes[static_cast<size_t>(shared)];
      credit_.assign(hosts_.size(), 0);
      mass_ = static_cast<double>(shared_loads[static_cast<size_t>(shared)].mass);
    }
  }

  /// -1 where no receiver's turn has come.
  int32_t next(HostSpan receivers) {
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

class CutBuilder {
 public:
  CutBuilder(const ReshardingPlan& plan, const Network& network, const CutOptions& options)
      : plan_(plan), network_(network), hosts_(plan, network), options_(options) {
    for (int32_t host = 0; host < network.numHosts(); ++host) {
      rates_.push_back(network.nicBytesPerS(host));
    }
  }

  Cut build() {
    constexpr int64_t kEnoughStripes = 64;
    slices_ = sliceClassesOf(plan_, hosts_, options_.num_chunks > 0 ? options_.num_chunks : kEnoughStripes, out_.host_sets);
    fill();
    chooseChunk(options_.num_chunks);
    reserve();
    for (size_t i = 0; i < slices_.classes.size(); ++i) {
      const int32_t shared = share_load_[i];
      cut(slices_.classes[i], shared < 0 ? std::span<const double>() : filled_.bytes[static_cast<size_t>(shared)],
          RelayRotation(spread_load_[i], shared_loads_, filled_));
    }
    cutPartialClasses();
    countMessages();
    return std::move(out_);
  }

 private:
  /// First copies over the holders, further copies over holders and needers alike, contributions over their holders.
  void fill() {
    std::vector<SharedLoad> shared_loads;
    std::vector<SharedLoad> more;
    std::vector<int64_t> incoming(rates_.size(), 0);
    const auto addSpread = [&](const SliceClass& slices) {
      for (int32_t host : slices.receivers) {
        incoming[static_cast<size_t>(host)] += slices.num_bytes;
      }
      if (slices.receivers.size() > 1) {
        Hosts all;
        std::set_union(slices.sources.begin(), slices.sources.end(), slices.receivers.begin(), slices.receivers.end(), std::back_inserter(all));
        spread_load_.push_back(static_cast<int32_t>(more.size()));
        more.push_back({all, slices.num_bytes * static_cast<int64_t>(slices.receivers.size() - 1)});
      } else {
        spread_load_.push_back(-1);
      }
      out_.largest_fan = std::max(out_.largest_fan, static_cast<int64_t>(slices.receivers.size()));
    };
    std::vector<int64_t> alone(rates_.size(), 0);  // bytes that only this host can send first
    for (const SliceClass& slices : slices_.classes) {
      const bool has_choice = slices.sources.size() > 1 && !slices.receivers.empty();
      share_load_.push_back(has_choice ? static_cast<int32_t>(shared_loads.size()) : -1);
      if (has_choice) {
        shared_loads.push_back({Hosts(slices.sources.begin(), slices.sources.end()), slices.num_bytes});
      } else if (!slices.receivers.empty()) {
        alone[static_cast<size_t>(slices.sources[0])] += slices.num_bytes;
      }
      addSpread(slices);
    }
    for (const PartialClass& partial_class : slices_.partial_classes) {
      addSpread(partial_class.slices);
      if (!partial_class.slices.receivers.empty()) {
        alone[static_cast<size_t>(partial_class.slices.sources[0])] += partial_class.slices.num_bytes;
      }
      addPartials(partial_class, more, incoming);
    }
    for (size_t host = 0; host < rates_.size(); ++host) {
      if (alone[host] > 0) {
        shared_loads.push_back({{static_cast<int32_t>(host)}, alone[host]});
      }
    }
    for (int32_t& shared : spread_load_) {
      shared += shared >= 0 ? static_cast<int32_t>(shared_loads.size()) : 0;
    }
    shared_loads.insert(shared_loads.end(), more.begin(), more.end());
    shared_loads_ = shared_loads;
    double bound_s = plan_.lower_bound_seconds;
    for (size_t host = 0; host < rates_.size(); ++host) {
      bound_s = std::max(bound_s, static_cast<double>(incoming[host]) / static_cast<double>(rates_[host]));
    }
    filled_ = waterFill(shared_loads, rates_, bound_s);
    out_.bottleneck_s = std::max(bound_s, filled_.largest_load_s);
    if (options_.has_few_owners) {
      concentrate();
    }
  }

  /// What the hosts of a partial_class send, and its owner receives.
  void addPartials(const PartialClass& partial_class, std::vector<SharedLoad>& more, std::vector<int64_t>& incoming) {
    const bool is_chain = options_.reduction_way == ReductionWay::kChain;
    const int32_t owner = partial_class.slices.sources[0];
    const int64_t num_bytes = is_chain ? accumulatorBytes(plan_, slices_.rangesOf(partial_class.slices)) : partial_class.slices.num_bytes;
    std::vector<Hosts> sending = hosts_.holders[static_cast<size_t>(partial_class.holders)];
    std::erase_if(sending, [&](const Hosts& holders) { return has(holders, owner); });
    if (is_chain) {  // a host sends once for all that it holds
      std::sort(sending.begin(), sending.end());
      sending.erase(std::unique(sending.begin(), sending.end()), sending.end());
      out_.longest_chain = std::max(out_.longest_chain, static_cast<int64_t>(sending.size()));
    }
    incoming[static_cast<size_t>(owner)] += num_bytes * (is_chain ? 1 : static_cast<int64_t>(sending.size()));
    for (const Hosts& holders : sending) {
      more.push_back({holders, num_bytes});
    }
  }

  /// Replaces the levelled shares by those of a maximum flow, which fills one host after the other.
  void concentrate() {
    constexpr int64_t kRate = 1'000'000;
    const auto mass = static_cast<int64_t>(std::ceil(out_.bottleneck_s * (1 + 1e-6) * static_cast<double>(kRate)));
    const std::vector<std::vector<int64_t>> split = splitWithin(shared_loads_, rates_, {mass, kRate});
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
      const double depth = 1.0 + std::bit_width(static_cast<uint64_t>(out_.largest_fan)) + static_cast<double>(out_.longest_chain);
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
    out_.chunks_per_port = static_cast<double>(num_chunks);
    out_.max_chunk_bytes = bytes > 0 ? std::clamp<int64_t>(static_cast<int64_t>(bytes), 1, kMaxChunkBytes) : kMaxChunkBytes;
  }

  void reserve() {
    size_t num_chunks = 0;
    for (const SliceClass& slices : slices_.classes) {
      num_chunks += (slices.sources.size() == 1 ? 1 : 2) + static_cast<size_t>(slices.num_bytes / out_.max_chunk_bytes);
    }
    out_.chunks.reserve(num_chunks);
    out_.ranges.reserve(std::max(num_chunks, slices_.ranges.size()));
  }

  void countMessages() {
    std::vector<int64_t> sent(rates_.size(), 0);
    std::vector<int64_t> received(rates_.size(), 0);
    for (const Chunk& chunk : out_.chunks) {
      const int64_t num_ranges = chunk.num_ranges;
      sent[static_cast<size_t>(chunk.owner)] += chunk.receivers.empty() ? 0 : num_ranges;
      for (int32_t host : chunk.receivers) {
        received[static_cast<size_t>(host)] += num_ranges;
      }
    }
    for (size_t host = 0; host < rates_.size(); ++host) {
      out_.most_messages = std::max({out_.most_messages, sent[host], received[host]});
    }
  }

  /// Bytes of each of the fewest chunks of at most about a chunk, all alike but the last, so that ports fall free together; whole elements of any
  /// type.
  static double evenChunkBytes(double num_bytes, double max_chunk_bytes) {
    constexpr double kLongestItem = 16;
    const double num_chunks = std::max(1.0, std::ceil(num_bytes / max_chunk_bytes - 1e-6));
    return std::ceil(num_bytes / num_chunks / kLongestItem) * kLongestItem;
  }

  /// More holders than chunks, and nothing else to balance: the holders that owe a first copy are spread evenly.
  void cutOncePerChunk(const SliceClass& slices, RelayRotation& relays) {
    RangeCutter cutter(plan_, slices_.rangesOf(slices), out_.ranges);
    const auto num_bytes = static_cast<double>(slices.num_bytes);
    const double chunk_bytes = evenChunkBytes(num_bytes, static_cast<double>(out_.max_chunk_bytes));
    const auto num_sources = static_cast<double>(slices.sources.size());
    for (int64_t given = 0; given < slices.num_bytes;) {
      const auto k = static_cast<size_t>(static_cast<double>(given) / num_bytes * num_sources);
      Chunk chunk = cutChunk(cutter, chunk_bytes, slices.receivers, out_);
      chunk.owner = slices.sources[std::min(k, slices.sources.size() - 1)];
      chunk.sources = slices.sources;
      chunk.relay = relays.next(slices.receivers);
      given += chunk.num_bytes;
      out_.chunks.push_back(chunk);
    }
  }

  /// `shares`: bytes that each source owes; empty: the last one owes all.
  void cut(const SliceClass& slices, std::span<const double> shares, RelayRotation relays) {
    const auto max_chunk_bytes = static_cast<double>(slices.receivers.empty() ? kMaxChunkBytes : out_.max_chunk_bytes);
    if (slices_.classes.size() == 1 && static_cast<double>(slices.sources.size()) * max_chunk_bytes > static_cast<double>(slices.num_bytes)) {
      cutOncePerChunk(slices, relays);
      return;
    }
    RangeCutter cutter(plan_, slices_.rangesOf(slices), out_.ranges);
    double owed = 0;
    int64_t given = 0;
    for (size_t k = shares.empty() ? slices.sources.size() - 1 : 0; k < slices.sources.size(); ++k) {
      owed += shares.empty() ? 0 : shares[k];
      const double target = k + 1 == slices.sources.size() ? static_cast<double>(slices.num_bytes) : owed;
      const double stripe = target - static_cast<double>(given);
      const double chunk_bytes = evenChunkBytes(stripe, max_chunk_bytes);
      while (target - static_cast<double>(given) >= 1 && given < slices.num_bytes) {
        Chunk chunk = cutChunk(cutter, std::min(chunk_bytes, target - static_cast<double>(given)), slices.receivers, out_);
        chunk.owner = slices.sources[k];
        chunk.sources = slices.sources;
        chunk.relay = relays.next(slices.receivers);
        given += chunk.num_bytes;
        out_.chunks.push_back(chunk);
      }
    }
  }

  void cutPartialClasses() {
    std::vector<double> incoming_s(rates_.size(), 0);
    const auto addReceived = [&](const SliceClass& slices) {
      for (int32_t host : slices.receivers) {
        incoming_s[static_cast<size_t>(host)] += static_cast<double>(slices.num_bytes) / static_cast<double>(rates_[static_cast<size_t>(host)]);
      }
    };
    std::for_each(slices_.classes.begin(), slices_.classes.end(), addReceived);
    std::for_each(slices_.partial_classes.begin(), slices_.partial_classes.end(),
                  [&](const PartialClass& partial_class) { addReceived(partial_class.slices); });
    ReductionCutter cutter(plan_, hosts_, network_, options_.reduction_way, std::move(incoming_s));
    for (const PartialClass& partial_class : slices_.partial_classes) {
      const double chunk_bytes = evenChunkBytes(static_cast<double>(partial_class.slices.num_bytes), static_cast<double>(out_.max_chunk_bytes));
      cutter.cut(slices_, partial_class, chunk_bytes, out_);
    }
  }

  const ReshardingPlan& plan_;
  const Network& network_;
  HostSets hosts_;
  CutOptions options_;
  std::vector<int64_t> rates_;
  SliceClasses slices_;
  std::vector<int32_t> share_load_;   ///< by class: the shared load of its first copies, or -1 where no choice is
  std::vector<int32_t> spread_load_;  ///< by class: the shared load of its further copies, or -1
  std::vector<SharedLoad> shared_loads_;
  FilledLoads filled_;
  Cut out_;
};

}  // namespace

Cut cutIntoChunks(const ReshardingPlan& plan, const Network& network, const CutOptions& options) {
  return CutBuilder(plan, network, options).build();
}

}  // namespace xmesh::core
