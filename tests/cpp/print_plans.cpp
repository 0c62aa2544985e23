/// Prints plans of random layouts as JSON, one a line, under every strategy and "auto": what builds of the core are compared by.
///   print_plans SEED NUM_LAYOUTS

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "core/resharding/plan_json.h"
#include "core/resharding/plan_resharding.h"
#include "core/resharding/strategy_registry.h"
#include "random_layouts.h"

namespace {

/// Every fourth layout is large, so that it is cut into chunks.
xmesh::layouts::LayoutOptions optionsOf(int layout) {
  xmesh::layouts::LayoutOptions options;
  if (layout % 4 == 0) {
    options.max_dims = 2;
    options.max_extent = 4096;
    options.max_elements = int64_t{1} << 24;
  }
  return options;
}

std::string oneLine(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s SEED NUM_LAYOUTS\n", argv[0]);
    return 2;
  }
  std::mt19937_64 rng(std::strtoull(argv[1], nullptr, 10));
  const int num_layouts = std::atoi(argv[2]);
  for (int layout = 0; layout < num_layouts; ++layout) {
    std::vector<xmesh::core::TensorPair> tensors;
    for (int tensor = 0; tensor <= layout % 3; ++tensor) {
      tensors.push_back(xmesh::layouts::randomPair(rng, optionsOf(layout)));
    }
    const xmesh::core::Topology topology = xmesh::layouts::randomTopology(rng, optionsOf(layout).num_ranks);
    std::vector<std::string> names = {"auto"};
    for (const xmesh::core::StrategyInfo& info : xmesh::core::strategies()) {
      names.push_back(info.name);
    }
    for (const std::string& name : names) {
      const xmesh::core::Strategy strategy = xmesh::core::parseStrategy(name);
      std::puts(oneLine(xmesh::core::planToJson(xmesh::core::planResharding(tensors, topology, strategy))).c_str());
    }
  }
  return 0;
}
