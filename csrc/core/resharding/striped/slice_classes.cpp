#include "core/resharding/striped/slice_classes.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <numeric>
#include <utility>

#include "core/resharding/striped/range_cutter.h"

namespace xmesh::core {
namespace {

using Hosts = std::vector<int32_t>;

bool isAmong(std::span<const int32_t> hosts, int32_t host) { return std::binary_search(hosts.begin(), hosts.end(), host); }

Hosts hostsWithout(std::span<const int32_t> hosts, std::span<const int32_t> others) {
  Hosts out;
  std::set_difference(hosts.begin(), hosts.end(), others.begin(), others.end(), std::back_inserter(out));
  return out;
}

bool haveNoneInCommon(std::span<const int32_t> a, std::span<const int32_t> b) {
  return std::none_of(a.begin(), a.end(), [&](int32_t host) { return isAmong(b, host); });
}

class ClassCollector {
 public:
  ClassCollector(const ReshardingPlan& plan, const HostSets& hosts, int64_t num_chunks, HostSetTable& host_sets)
      : plan_(plan),
        hosts_(hosts),
        num_chunks_(num_chunks),
        host_sets_(host_sets),
        set_of_holders_(static_cast<size_t>(hosts_.num_holder_ids), -1),
        set_of_needers_(static_cast<size_t>(hosts_.num_needer_ids), -1) {}

  SliceClasses collect() {
    const auto num_sets = int64_t{hosts_.num_holder_ids} + hosts_.num_needer_ids;
    PairIndex pairs(hosts_.num_holder_ids, hosts_.num_needer_ids);
    PairIndex class_index(num_sets, num_sets);  // by sources and receivers
    std::vector<int32_t> class_of_pair;         // -1: Partial that no needing host can reduce alone
    std::vector<int32_t> class_of_task(plan_.tasks.size());
    for (size_t task = 0; task < plan_.tasks.size(); ++task) {
      const UnitTask& unit = plan_.tasks[task];
      const auto [pair, is_new] =
          pairs.idOf(hosts_.holder_ids[static_cast<size_t>(unit.holders)], hosts_.needer_ids[static_cast<size_t>(unit.needers)]);
      if (is_new) {
        class_of_pair.push_back(classOf(unit, class_index));
      }
      class_of_task[task] = class_of_pair[static_cast<size_t>(pair)];
      if (class_of_task[task] >= 0) {
        SliceClass& slices = out_.classes[static_cast<size_t>(class_of_task[task])];
        ++slices.num_ranges;
        slices.num_bytes += numElements(unit.box) * plan_.itemBytes(unit);
      }
    }
    size_t num_ranges = 0;
    for (SliceClass& slices : out_.classes) {
      slices.first_range = num_ranges;
      num_ranges += std::exchange(slices.num_ranges, 0);
    }
    out_.ranges.resize(num_ranges);
    std::map<std::pair<int64_t, Hosts>, std::vector<SliceRange>> partial;  // by holders and needing hosts
    for (size_t task = 0; task < plan_.tasks.size(); ++task) {
      const UnitTask& unit = plan_.tasks[task];
      const SliceRange range{static_cast<int32_t>(task), 0, numElements(unit.box)};
      if (class_of_task[task] < 0) {
        partial[{unit.holders, hosts_.needers[static_cast<size_t>(unit.needers)]}].push_back(range);
      } else {
        SliceClass& slices = out_.classes[static_cast<size_t>(class_of_task[task])];
        out_.ranges[slices.first_range + slices.num_ranges++] = range;
      }
    }
    for (const auto& [key, ranges] : partial) {
      stripeOverReducers(key.first, key.second, ranges);
    }
    return std::move(out_);
  }

 private:
  /// The class of a slice whose hosts were not met before, made where there is none; -1 where no needing host can reduce it alone.
  int32_t classOf(const UnitTask& unit, PairIndex& class_index) {
    const std::vector<Hosts>& holders = hosts_.holders[static_cast<size_t>(unit.holders)];
    const Hosts& needers = hosts_.needers[static_cast<size_t>(unit.needers)];
    int32_t sources = -1;
    int32_t receivers = -1;
    if (holders.size() == 1) {
      sources = setOf(holders.front(), set_of_holders_, hosts_.holder_ids[static_cast<size_t>(unit.holders)]);
      receivers = haveNoneInCommon(needers, holders.front()) ? setOf(needers, set_of_needers_, hosts_.needer_ids[static_cast<size_t>(unit.needers)])
                                                             : host_sets_.idOf(hostsWithout(needers, holders.front()));
    } else {
      Hosts complete = needers;  // needing hosts where every contribution is at hand
      std::erase_if(complete,
                    [&](int32_t host) { return !std::all_of(holders.begin(), holders.end(), [&](const Hosts& h) { return isAmong(h, host); }); });
      if (complete.empty()) {
        return -1;
      }
      sources = host_sets_.idOf(complete);
      receivers = host_sets_.idOf(hostsWithout(needers, complete));
    }
    const auto [index, is_new] = class_index.idOf(sources, receivers);
    if (is_new) {
      out_.classes.push_back({.sources = host_sets_.at(sources), .receivers = host_sets_.at(receivers)});
    }
    return index;
  }

  /// The hosts' number in the table, remembered by `id`.
  int32_t setOf(const Hosts& hosts, std::vector<int32_t>& known, int32_t id) {
    int32_t& set = known[static_cast<size_t>(id)];
    set = set < 0 ? host_sets_.idOf(hosts) : set;
    return set;
  }

  /// A needing host that lacks l contributions and reduces the share x receives (l - 1) x more than the slice itself: equal for all at x ~ 1 / (l -
  /// 1). Hosts that lack one reduce at no cost and share all between them.
  void stripeOverReducers(int64_t holders, const Hosts& needers, const std::vector<SliceRange>& ranges) {
    const std::vector<Hosts>& contributions = hosts_.holders[static_cast<size_t>(holders)];
    std::vector<double> weights;
    bool any_free = false;
    for (int32_t host : needers) {
      const auto lacking = std::count_if(contributions.begin(), contributions.end(), [&](const Hosts& h) { return !isAmong(h, host); });
      any_free = any_free || lacking == 1;
      weights.push_back(lacking > 1 ? 1.0 / static_cast<double>(lacking - 1) : 0);
    }
    for (double& weight : weights) {
      weight = any_free ? (weight == 0 ? 1 : 0) : weight;
    }
    int64_t num_bytes = 0;
    for (const SliceRange& range : ranges) {
      num_bytes += (range.end - range.begin) * plan_.itemBytes(plan_.tasks[static_cast<size_t>(range.task)]);
    }
    keepSome(weights, num_bytes);
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    RangeCutter cutter(plan_, ranges, out_.ranges);
    int64_t given = 0;
    double passed = 0;
    for (size_t i = 0; i < needers.size(); ++i) {
      passed += weights[i];
      const double target = std::round(static_cast<double>(num_bytes) * (passed / total)) - static_cast<double>(given);
      if (weights[i] == 0 || target < 1) {
        continue;
      }
      SliceClass slices;
      slices.first_range = out_.ranges.size();
      slices.num_bytes = cutter.take(target);
      slices.num_ranges = out_.ranges.size() - slices.first_range;
      given += slices.num_bytes;
      if (slices.num_ranges > 0) {
        slices.sources = host_sets_.at(host_sets_.idOf({needers[i]}));
        slices.receivers = host_sets_.at(host_sets_.idOf(hostsWithout(needers, slices.sources)));
        out_.partial_classes.push_back({slices, holders});
      }
    }
  }

  /// Sets all but some weights to 0, where stripes would get much smaller than a chunk; the others' turn comes with later classes.
  void keepSome(std::vector<double>& weights, int64_t num_bytes) {
    std::vector<size_t> eligible;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (weights[i] > 0) {
        eligible.push_back(i);
      }
    }
    const int64_t max_chunk_bytes = std::max<int64_t>(1, plan_.lower_bound_bytes / num_chunks_);
    const auto num_kept = static_cast<size_t>((num_bytes + max_chunk_bytes - 1) / max_chunk_bytes);
    if (num_kept >= eligible.size()) {
      return;
    }
    std::vector<double> kept(weights.size(), 0);
    for (size_t i = 0; i < num_kept; ++i) {
      const size_t chosen = eligible[turn_++ % eligible.size()];
      kept[chosen] = weights[chosen];
    }
    weights = std::move(kept);
  }

  const ReshardingPlan& plan_;
  const HostSets& hosts_;
  int64_t num_chunks_;
  HostSetTable& host_sets_;
  std::vector<int32_t> set_of_holders_;  ///< by id in hosts_: the set in host_sets_, or -1
  std::vector<int32_t> set_of_needers_;
  size_t turn_ = 0;  ///< which reducer is next
  SliceClasses out_;
};

}  // namespace

SliceClasses sliceClassesOf(const ReshardingPlan& plan, const HostSets& hosts, int64_t num_chunks, HostSetTable& host_sets) {
  return ClassCollector(plan, hosts, num_chunks, host_sets).collect();
}

}  // namespace xmesh::core
