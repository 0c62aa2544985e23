#include <deque>
#include <vector>

#include "core/pipeline/generators.h"

namespace xmesh::core {

Schedule zeroBubbleH1(const PipelineShape& shape) {
  const Schedule whole = oneFOneB(shape);
  const std::vector<int32_t> runs = depths(shape);
  Schedule out{"zb_h1", shape.num_stages, shape.num_microbatches, shape.place_of_stage, {}};
  for (int32_t place = 0; place < whole.numPlaces(); ++place) {
    auto& cells = out.cells.emplace_back();
    std::vector<std::deque<Action>> owed_of(static_cast<size_t>(shape.num_stages));
    for (const Action& action : whole.actionsOf(place)) {
      if (action.kind == ActionKind::kForward) {
        cells.emplace_back(action);
        continue;
      }
      cells.emplace_back(Action{ActionKind::kBackwardInput, action.stage, action.microbatch});
      std::deque<Action>& owed = owed_of[static_cast<size_t>(action.stage)];
      owed.push_back({ActionKind::kBackwardWeight, action.stage, action.microbatch});
      if (static_cast<int32_t>(owed.size()) > runs.front() - runs[static_cast<size_t>(action.stage)]) {
        cells.emplace_back(owed.front());
        owed.pop_front();
      }
    }
    for (const std::deque<Action>& owed : owed_of) {
      cells.insert(cells.end(), owed.begin(), owed.end());
    }
  }
  return out;
}

}  // namespace xmesh::core
