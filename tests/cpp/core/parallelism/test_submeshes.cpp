// Submeshes cover a cluster: all lists of shapes that Alpa's theorem is about, and others against all placements.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/parallelism/submeshes.h"

namespace xmesh::core {
namespace {

using Placement = std::optional<std::vector<std::vector<HostDevices>>>;

size_t size(const Submesh& submesh, size_t num_classes = 1) {
  size_t out = 0;
  for (const size_t devices : submesh.numDevices(num_classes)) {
    out += devices;
  }
  return out;
}

/// That each submesh has the shape it wants, on consecutive hosts, and no device is given twice.
void expectPlaced(const std::vector<HostClass>& cluster, const std::vector<Submesh>& submeshes, const Placement& placement) {
  ASSERT_TRUE(placement);
  ASSERT_EQ(placement->size(), submeshes.size());
  std::set<std::vector<size_t>> used;
  for (size_t index = 0; index < submeshes.size(); ++index) {
    auto next = (*placement)[index].begin();
    for (const SubmeshPart& part : submeshes[index].parts) {
      const size_t first_host = next->host;
      for (size_t host = 0; host < part.num_hosts; ++host, ++next) {
        ASSERT_NE(next, (*placement)[index].end());
        EXPECT_EQ(next->host_class, part.host_class);
        EXPECT_EQ(next->host, first_host + host);
        EXPECT_LT(next->host, cluster[part.host_class].num_hosts);
        EXPECT_EQ(next->num_devices, part.devices_per_host);
        EXPECT_LE(next->first_device + next->num_devices, cluster[part.host_class].devices_per_host);
        for (size_t device = 0; device < next->num_devices; ++device) {
          EXPECT_TRUE(used.insert({part.host_class, next->host, next->first_device + device}).second);
        }
      }
    }
    EXPECT_EQ(next, (*placement)[index].end());
  }
}

/// All multisets of `shapes`, from `first` on, that have `num_devices` together.
template <typename Visit>
void forEachMultiset(const std::vector<Submesh>& shapes, size_t first, size_t num_devices, std::vector<Submesh>& begun, const Visit& visit) {
  if (num_devices == 0) {
    visit(begun);
    return;
  }
  for (size_t shape = first; shape < shapes.size(); ++shape) {
    if (size(shapes[shape]) <= num_devices) {
      begun.push_back(shapes[shape]);
      forEachMultiset(shapes, shape, num_devices - size(shapes[shape]), begun, visit);
      begun.pop_back();
    }
  }
}

TEST(Submeshes, AlpasShapesAlwaysCover) {
  std::mt19937_64 random(7);
  for (size_t num_hosts = 1; num_hosts <= 8; ++num_hosts) {
    for (size_t devices_per_host = 1; devices_per_host <= 8; devices_per_host *= 2) {
      const std::vector<HostClass> cluster{{num_hosts, devices_per_host}};
      std::vector<Submesh> begun;
      forEachMultiset(submeshShapes(cluster), 0, num_hosts * devices_per_host, begun, [&](std::vector<Submesh> list) {
        for (const bool is_shuffled : {false, true}) {
          if (is_shuffled) {
            for (size_t left = list.size(); left > 1; --left) {
              std::swap(list[left - 1], list[random() % left]);
            }
          }
          expectPlaced(cluster, list, placeSubmeshes(cluster, list));
        }
      });
    }
  }
}

/// What may be free on hosts, in ascending order, once all is placed: every way tried.
bool hasPlacement(const HostClass& hosts, const std::vector<Submesh>& submeshes) {
  std::set<std::vector<size_t>> states{std::vector<size_t>(hosts.num_hosts, hosts.devices_per_host)};
  for (const Submesh& submesh : submeshes) {
    std::set<std::vector<size_t>> next;
    for (const std::vector<size_t>& state : states) {
      if (submesh.parts[0].num_hosts > 1) {
        std::vector<size_t> after = state;
        const auto last = after.end() - static_cast<std::ptrdiff_t>(submesh.parts[0].num_hosts);
        if (*last == hosts.devices_per_host) {
          std::fill(last, after.end(), 0);
          std::sort(after.begin(), after.end());
          next.insert(after);
        }
        continue;
      }
      for (size_t host = 0; host < state.size(); ++host) {
        if (state[host] >= submesh.parts[0].devices_per_host) {
          std::vector<size_t> after = state;
          after[host] -= submesh.parts[0].devices_per_host;
          std::sort(after.begin(), after.end());
          next.insert(after);
        }
      }
    }
    states = std::move(next);
  }
  return !states.empty();
}

TEST(Submeshes, OtherShapesAreFoundWhereTheyFit) {
  size_t num_without = 0;
  for (const HostClass hosts : {HostClass{3, 6}, HostClass{2, 5}, HostClass{3, 3}, HostClass{4, 6}}) {
    const std::vector<HostClass> cluster{hosts};
    const size_t total = hosts.num_hosts * hosts.devices_per_host;
    for (size_t num_devices = hosts.num_hosts == 4 ? total : 1; num_devices <= total; ++num_devices) {
      std::vector<Submesh> begun;
      forEachMultiset(submeshShapes(cluster), 0, num_devices, begun, [&](const std::vector<Submesh>& list) {
        const Placement placement = placeSubmeshes(cluster, list);
        ASSERT_EQ(placement.has_value(), hasPlacement(hosts, list));
        if (placement) {
          expectPlaced(cluster, list, placement);
        } else {
          ++num_without;
        }
      });
    }
  }
  EXPECT_GT(num_without, 0U);  // such as 4, 4, 4, 3, 3 on 3 x 6
}

TEST(Submeshes, ShapesOfAHost) {
  EXPECT_EQ(submeshShapes({{3, 4}}), (std::vector<Submesh>{{{{0, 1, 1}}}, {{{0, 1, 2}}}, {{{0, 1, 4}}}, {{{0, 2, 4}}}, {{{0, 3, 4}}}}));
  EXPECT_EQ(submeshShapes({{1, 6}}), (std::vector<Submesh>{{{{0, 1, 1}}}, {{{0, 1, 2}}}, {{{0, 1, 3}}}, {{{0, 1, 4}}}, {{{0, 1, 6}}}}));
  EXPECT_EQ(submeshShapes({{128, 8}}, {HostCounts::kPowersOfTwo, false}).size(), 11U);
  EXPECT_EQ(submeshShapes({{6, 1}}, {HostCounts::kPowersOfTwo, false}).back(), (Submesh{{{0, 6, 1}}}));
}

TEST(Submeshes, MixedOnesHaveWholeHosts) {
  const std::vector<HostClass> cluster{{2, 2}, {1, 4}};
  const std::vector<Submesh> shapes = submeshShapes(cluster, {HostCounts::kAll, true});
  EXPECT_EQ(shapes.size(), 3U + 3U + 2U);
  const Submesh& all = shapes.back();
  EXPECT_EQ(all.numDevices(2), (std::vector<size_t>{4, 4}));
  expectPlaced(cluster, {all}, placeSubmeshes(cluster, {all}));
  const std::vector<Submesh> stages{{{{0, 1, 1}}}, shapes[6], {{{0, 1, 1}}}};
  EXPECT_EQ(shapes[6].numDevices(2), (std::vector<size_t>{2, 4}));
  expectPlaced(cluster, stages, placeSubmeshes(cluster, stages));
  EXPECT_FALSE(placeSubmeshes(cluster, {all, {{{0, 1, 1}}}}));
}

TEST(Submeshes, StagesThatFitInOrderAreInOrder) {
  const Submesh one{{{0, 1, 1}}};
  const Submesh two{{{0, 1, 2}}};
  const Submesh host{{{0, 1, 4}}};
  const Placement placement = placeSubmeshes({{3, 4}}, {one, one, two, host, two, two});
  ASSERT_TRUE(placement);
  const std::vector<HostDevices> expected{{0, 0, 0, 1}, {0, 0, 1, 1}, {0, 0, 2, 2}, {0, 1, 0, 4}, {0, 2, 0, 2}, {0, 2, 2, 2}};
  for (size_t stage = 0; stage < expected.size(); ++stage) {
    EXPECT_EQ((*placement)[stage], std::vector<HostDevices>{expected[stage]}) << stage;
  }
}

TEST(Submeshes, ElseTheLargestAreFirst) {
  const Submesh one{{{0, 1, 1}}};
  const Submesh two{{{0, 1, 2}}};
  const Submesh host{{{0, 1, 4}}};
  const Placement placement = placeSubmeshes({{2, 4}}, {one, host, one, two});
  ASSERT_TRUE(placement);
  EXPECT_EQ((*placement)[1][0], (HostDevices{0, 0, 0, 4}));
  EXPECT_EQ((*placement)[3][0], (HostDevices{0, 1, 0, 2}));
  EXPECT_EQ((*placement)[0][0], (HostDevices{0, 1, 2, 1}));
  EXPECT_EQ((*placement)[2][0], (HostDevices{0, 1, 3, 1}));
}

TEST(Submeshes, RefusesWhatIsNoneOfTheCluster) {
  const std::vector<HostClass> cluster{{2, 4}, {1, 2}};
  EXPECT_THROW(placeSubmeshes(cluster, {{}}), InvalidArgument);
  EXPECT_THROW(placeSubmeshes(cluster, {{{{0, 2, 2}}}}), InvalidArgument);
  EXPECT_THROW(placeSubmeshes(cluster, {{{{0, 3, 4}}}}), InvalidArgument);
  EXPECT_THROW(placeSubmeshes(cluster, {{{{2, 1, 1}}}}), InvalidArgument);
  EXPECT_THROW(placeSubmeshes(cluster, {{{{1, 1, 4}}}}), InvalidArgument);
  EXPECT_THROW(placeSubmeshes(cluster, {{{{0, 0, 4}}}}), InvalidArgument);
  EXPECT_THROW(placeSubmeshes(cluster, {{{{0, 1, 2}, {1, 1, 2}}}}), InvalidArgument);
  EXPECT_THROW(placeSubmeshes(cluster, {{{{1, 1, 2}, {0, 1, 4}}}}), InvalidArgument);
  EXPECT_THROW(submeshShapes({}), InvalidArgument);
  EXPECT_THROW(submeshShapes({{0, 4}}), InvalidArgument);
  EXPECT_THROW(submeshShapes({{4, 0}}), InvalidArgument);
}

}  // namespace
}  // namespace xmesh::core
