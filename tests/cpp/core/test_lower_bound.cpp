#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/resharding/decompose.h"
#include "core/resharding/host_load.h"
#include "core/resharding/host_sets.h"
#include "core/resharding/lower_bound.h"
#include "published_cases.h"
#include "random_layouts.h"

namespace xmesh::core {
namespace {

ReshardingPlan decomposed(std::vector<TensorPair> tensors, Topology topology) {
  ReshardingPlan plan;
  plan.tensors = std::move(tensors);
  plan.topology = std::move(topology);
  decompose(plan);
  return plan;
}

/// Bit sets of hosts.
uint32_t bitsOf(const std::vector<int32_t>& hosts) {
  uint32_t out = 0;
  for (int32_t host : hosts) {
    out |= uint32_t{1} << host;
  }
  return out;
}

/// The bound from its definition, over every host set; sources without Partial.
double boundByEnumeration(const ReshardingPlan& plan) {
  const Network network(plan);
  const HostSets hosts(plan, network);
  double worst = 0;
  for (uint32_t set = 1; set < uint32_t{1} << network.numHosts(); ++set) {
    double rate = 0;
    double out_bytes = 0;
    double in_bytes = 0;
    for (int32_t host = 0; host < network.numHosts(); ++host) {
      rate += (set >> host & 1) != 0 ? static_cast<double>(network.nicBytesPerS(host)) : 0;
    }
    for (const UnitTask& task : plan.tasks) {
      const auto bytes = static_cast<double>(numElements(task.box) * plan.itemBytes(task));
      const uint32_t holders = bitsOf(hosts.holders[static_cast<size_t>(task.holders)].front());
      const uint32_t missing = bitsOf(hosts.needers[static_cast<size_t>(task.needers)]) & ~holders;
      out_bytes += missing != 0 && (holders & ~set) == 0 ? bytes : 0;
      in_bytes += (missing & set) != 0 ? bytes : 0;
    }
    worst = std::max({worst, out_bytes / rate, std::popcount(set) == 1 ? in_bytes / rate : 0});
  }
  return worst;
}

TEST(LowerBound, EqualsItsDefinitionOnRandomLayouts) {
  for (uint64_t seed = 0; seed < 1500; ++seed) {
    std::mt19937_64 rng(seed);
    layouts::LayoutOptions options;
    options.allow_partial = false;
    std::vector<TensorPair> tensors = {layouts::randomPair(rng, options)};
    if (seed % 3 == 0) {
      tensors.push_back(layouts::randomPair(rng, options));
    }
    const ReshardingPlan plan = decomposed(tensors, layouts::randomTopology(rng, options.num_ranks));
    const Network network(plan);
    ASSERT_LE(network.numHosts(), 12);
    const double expected = boundByEnumeration(plan);
    ASSERT_NEAR(lowerBound(plan, network).seconds, expected, 1e-9 * expected) << "seed " << seed;
  }
}

TEST(LowerBound, PublishedCases) {
  // c2 has two replicas: one would have to send everything, two half each.
  const std::vector<layouts::PublishedCase> cases = layouts::publishedCases();
  const std::vector<int64_t> mib = {1024, 1024, 1024, 1024, 1024, 1020, 2048, 2048, 1024};
  for (size_t i = 0; i < cases.size(); ++i) {
    const ReshardingPlan plan = decomposed({layouts::pairOf(cases[i])}, layouts::topologyOf(cases[i]));
    EXPECT_EQ(lowerBound(plan, Network(plan)).bytes, mib[i] << 20) << cases[i].name;
  }
}

TEST(LowerBound, Partial) {
  const DType dtype = DType::parse("float32");
  const auto bytesOf = [&](const Mesh& src, const std::vector<Placement>& placements, const Mesh& dst) {
    const ReshardingPlan plan = decomposed({{{{64}, dtype, src, placements}, {{64}, dtype, dst, {Placement::replicate()}}}}, Topology::uniform(8, 1));
    return lowerBound(plan, Network(plan)).bytes;
  };
  const Placement sum = Placement::partial(ReduceOp::kSum);
  EXPECT_EQ(bytesOf(Mesh({2}, {0, 1}), {sum}, Mesh({1}, {2})), 256);     // each contributor sends one slice, the needer receives at least one
  EXPECT_EQ(bytesOf(Mesh({2}, {0, 1}), {sum}, Mesh({2}, {0, 1})), 256);  // each needs the other's
  EXPECT_EQ(bytesOf(Mesh({1}, {0}), {sum}, Mesh({1}, {0})), 0);          // one contribution, held by the only needer
  EXPECT_EQ(bytesOf(Mesh({2}, {0, 1}), {sum}, Mesh({1}, {0})), 256);
  EXPECT_EQ(bytesOf(Mesh({2, 2}, {0, 1, 2, 3}), {sum, Placement::replicate()}, Mesh({1}, {4})), 256);
}

TEST(HostLoad, SplitsWithinTheBoundAndTheBoundIsTheEnumeratedOne) {
  for (uint64_t seed = 0; seed < 500; ++seed) {
    std::mt19937_64 rng(seed);
    const int64_t num_hosts = layouts::randomInt(rng, 1, 7);
    std::vector<int64_t> rates;
    for (int64_t host = 0; host < num_hosts; ++host) {
      rates.push_back(layouts::randomInt(rng, 1, 3) * 1'000'000'000);
    }
    std::vector<SharedLoad> shared_loads;
    for (int64_t i = layouts::randomInt(rng, 0, 9); i > 0; --i) {
      SharedLoad shared;
      const int64_t set = layouts::randomInt(rng, 1, (int64_t{1} << num_hosts) - 1);
      for (int32_t host = 0; host < num_hosts; ++host) {
        if ((set >> host & 1) != 0) {
          shared.hosts.push_back(host);
        }
      }
      shared.mass = layouts::randomInt(rng, 0, int64_t{1} << 40);
      shared_loads.push_back(shared);
    }
    double worst = 0;
    for (uint32_t set = 1; set < uint32_t{1} << num_hosts; ++set) {
      double mass = 0;
      double rate = 0;
      for (const SharedLoad& shared : shared_loads) {
        mass += (bitsOf(shared.hosts) & ~set) == 0 ? static_cast<double>(shared.mass) : 0;
      }
      for (int64_t host = 0; host < num_hosts; ++host) {
        rate += (set >> host & 1) != 0 ? static_cast<double>(rates[static_cast<size_t>(host)]) : 0;
      }
      worst = std::max(worst, mass / rate);
    }
    const LoadRatio bound = worstHostSet(shared_loads, rates, {0, 1});
    ASSERT_NEAR(bound.seconds(), worst, 1e-9 * worst) << "seed " << seed;
    std::vector<int64_t> load(rates.size(), 0);
    const std::vector<std::vector<int64_t>> split = splitWithin(shared_loads, rates, bound);
    for (size_t i = 0; i < shared_loads.size(); ++i) {
      int64_t sum = 0;
      for (size_t k = 0; k < split[i].size(); ++k) {
        ASSERT_GE(split[i][k], 0);
        sum += split[i][k];
        load[static_cast<size_t>(shared_loads[i].hosts[k])] += split[i][k];
      }
      ASSERT_EQ(sum, shared_loads[i].mass) << "seed " << seed;
    }
    for (size_t host = 0; host < rates.size(); ++host) {
      ASSERT_LE(static_cast<double>(load[host]), worst * static_cast<double>(rates[host]) + 200) << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace xmesh::core
