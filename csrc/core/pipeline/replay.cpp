#include "core/pipeline/replay.h"

#include <algorithm>

namespace xmesh::core {

Replay replay(const ActionTable& table) {
  const auto num_nodes = static_cast<size_t>(table.numNodes());
  Replay out{std::vector<int32_t>(num_nodes, -1), {}};
  std::vector<int32_t> waits_for(num_nodes, 0);
  std::vector<int32_t> earliest(num_nodes, 0);
  std::vector<std::vector<int32_t>> dependents(num_nodes);
  std::vector<int32_t> ready;
  const auto addArc = [&](int32_t first, int32_t second) {
    dependents[static_cast<size_t>(first)].push_back(second);
    ++waits_for[static_cast<size_t>(second)];
  };
  for (int32_t node = 0; node < table.numNodes(); ++node) {
    for (const ActionTable::Dependency& dependency : table.dependenciesOf(node)) {
      addArc(dependency.node, node);
    }
    if (node > table.firstNode(table.placeOf(node))) {
      addArc(node - 1, node);
    }
    if (waits_for[static_cast<size_t>(node)] == 0) {
      ready.push_back(node);
    }
  }
  while (!ready.empty()) {
    const int32_t node = ready.back();
    ready.pop_back();
    const int32_t step = earliest[static_cast<size_t>(node)];
    out.step[static_cast<size_t>(node)] = step;
    for (int32_t dependent : dependents[static_cast<size_t>(node)]) {
      earliest[static_cast<size_t>(dependent)] = std::max(earliest[static_cast<size_t>(dependent)], step + 1);
      if (--waits_for[static_cast<size_t>(dependent)] == 0) {
        ready.push_back(dependent);
      }
    }
  }
  for (int32_t place = 0; place < table.schedule().numPlaces(); ++place) {
    int32_t stuck = -1;
    for (int32_t node = table.firstNode(place); node < table.firstNode(place + 1) && stuck < 0; ++node) {
      stuck = out.step[static_cast<size_t>(node)] < 0 ? node : -1;
    }
    out.stuck_node.push_back(stuck);
  }
  return out;
}

}  // namespace xmesh::core
