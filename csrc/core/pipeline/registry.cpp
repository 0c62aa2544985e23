#include <algorithm>
#include <array>
#include <string_view>

#include "core/error.h"
#include "core/pipeline/generators.h"
#include "core/pipeline/validate.h"

namespace xmesh::core {
namespace {

struct Generator {
  std::string_view name;
  Schedule (*make)(const PipelineShape&);
};

constexpr std::array kGenerators = {
    Generator{"gpipe", &gpipe},
    Generator{"1f1b", &oneFOneB},
    Generator{"eager_1f1b", &eagerOneFOneB},
    Generator{"interleaved_1f1b", &interleavedOneFOneB},
    Generator{"looped_bfs", &loopedBfs},
    Generator{"zb_h1", &zeroBubbleH1},
    Generator{"eager_split", &eagerSplit},
    Generator{"interleaved_zb", &interleavedZeroBubble},
    Generator{"zb_v", &zeroBubbleV},
};

void checkShape(const PipelineShape& shape) {
  require(shape.num_stages > 0 && shape.num_microbatches > 0, "a schedule has at least one stage and one microbatch, got " +
                                                                  std::to_string(shape.num_stages) + " stages and " +
                                                                  std::to_string(shape.num_microbatches) + " microbatches");
  require(shape.place_of_stage.size() == static_cast<size_t>(shape.num_stages), "a schedule has one place per stage, got " +
                                                                                    std::to_string(shape.place_of_stage.size()) + " places for " +
                                                                                    std::to_string(shape.num_stages) + " stages");
  std::vector<bool> is_used(shape.place_of_stage.size(), false);
  for (size_t stage = 0; stage < shape.place_of_stage.size(); ++stage) {
    const int32_t place = shape.place_of_stage[stage];
    require(place >= 0 && place < shape.num_stages,
            "places are numbered from 0, each with a stage, got place " + std::to_string(place) + " for stage " + std::to_string(stage));
    is_used[static_cast<size_t>(place)] = true;
  }
  for (int32_t place = 0; place < shape.numPlaces(); ++place) {
    require(is_used[static_cast<size_t>(place)], "places are numbered from 0, each with a stage, got none on place " + std::to_string(place));
  }
}

}  // namespace

int32_t PipelineShape::numPlaces() const { return *std::max_element(place_of_stage.begin(), place_of_stage.end()) + 1; }

Schedule makeSchedule(const std::string& name, int32_t num_stages, int32_t num_microbatches, std::vector<int32_t> place_of_stage) {
  PipelineShape shape{num_stages, num_microbatches, std::move(place_of_stage)};
  if (shape.place_of_stage.empty()) {
    for (int32_t stage = 0; stage < num_stages; ++stage) {
      shape.place_of_stage.push_back(stage);
    }
  }
  std::string known;
  for (const Generator& generator : kGenerators) {
    if (generator.name == name) {
      checkShape(shape);
      Schedule schedule = alignCells(generator.make(shape));
      validateSchedule(schedule, chainEdges(num_stages));
      return schedule;
    }
    known += (known.empty() ? "'" : ", '") + std::string(generator.name) + "'";
  }
  throw InvalidArgument("unknown schedule '" + name + "'; expected one of " + known);
}

std::vector<std::string> scheduleNames() {
  std::vector<std::string> names;
  for (const Generator& generator : kGenerators) {
    names.emplace_back(generator.name);
  }
  return names;
}

}  // namespace xmesh::core
