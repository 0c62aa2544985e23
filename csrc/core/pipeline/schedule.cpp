#include "core/pipeline/schedule.h"

#include <algorithm>

#include "core/error.h"

namespace xmesh::core {
namespace {

/// Columns shown on either side of a marked cell.
constexpr int32_t kColumnsAround = 10;

struct Columns {
  int32_t begin = 0;
  int32_t end = 0;
};

std::string rowLabel(const Schedule& schedule, int32_t place, bool is_plain) {
  if (is_plain) {
    return "stage " + std::to_string(schedule.stagesOf(place).front());
  }
  std::string label = "place " + std::to_string(place) + " (";
  std::vector<int32_t> stages;
  for (const int32_t unit : schedule.stagesOf(place)) {
    const int32_t stage = schedule.segments.stageOf(unit);
    if (stages.empty() || stages.back() != stage) {
      stages.push_back(stage);
    }
  }
  for (size_t i = 0; i < stages.size(); ++i) {
    label += (i > 0 ? ", " : stages.size() > 1 ? "stages " : "stage ") + std::to_string(stages[i]);
  }
  return label + (stages.empty() ? "no stage)" : ")");
}

/// Every place has exactly one stage and no other stage's actions: the stage need not be repeated in each cell.
bool isPlain(const Schedule& schedule) {
  if (schedule.segments.isDivided()) {
    return false;
  }
  for (int32_t place = 0; place < schedule.numPlaces(); ++place) {
    const std::vector<int32_t> stages = schedule.stagesOf(place);
    const std::vector<Action> actions = schedule.actionsOf(place);
    if (stages.size() != 1 || std::any_of(actions.begin(), actions.end(), [&](const Action& action) { return action.stage != stages[0]; })) {
      return false;
    }
  }
  return true;
}

std::string cellText(const Schedule& schedule, const std::optional<Action>& cell, bool is_plain) {
  if (!cell) {
    return ".";
  }
  return is_plain ? static_cast<char>(cell->kind) + std::to_string(cell->microbatch) : schedule.textOf(*cell);
}

std::string grid(const Schedule& schedule, Columns columns, const CellPosition* marked) {
  const bool is_plain = isPlain(schedule);
  std::vector<std::vector<std::string>> rows;
  size_t label_width = 0;
  size_t width = 1;
  for (int32_t place = 0; place < schedule.numPlaces(); ++place) {
    const auto& cells = schedule.cells[static_cast<size_t>(place)];
    std::vector<std::string> row = {rowLabel(schedule, place, is_plain)};
    label_width = std::max(label_width, row[0].size());
    for (int32_t i = columns.begin; i < std::min(columns.end, static_cast<int32_t>(cells.size())); ++i) {
      const std::string text = cellText(schedule, cells[static_cast<size_t>(i)], is_plain);
      row.push_back(marked != nullptr && marked->place == place && marked->cell == i ? ">" + text + "<" : text);
      width = std::max(width, row.back().size());
    }
    rows.push_back(std::move(row));
  }
  std::string out;
  for (const std::vector<std::string>& row : rows) {
    std::string line = row[0] + std::string(label_width - row[0].size(), ' ') + " |" + (columns.begin > 0 ? " ..." : "");
    for (size_t i = 1; i < row.size(); ++i) {
      line += " " + row[i] + std::string(width - row[i].size(), ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

int32_t numColumns(const Schedule& schedule) {
  size_t columns = 0;
  for (const auto& cells : schedule.cells) {
    columns = std::max(columns, cells.size());
  }
  return static_cast<int32_t>(columns);
}

}  // namespace

std::vector<int32_t> Schedule::stagesOf(int32_t place) const {
  std::vector<int32_t> stages;
  for (size_t stage = 0; stage < place_of_stage.size(); ++stage) {
    if (place_of_stage[stage] == place) {
      stages.push_back(static_cast<int32_t>(stage));
    }
  }
  return stages;
}

std::vector<Action> Schedule::actionsOf(int32_t place) const {
  std::vector<Action> actions;
  for (const std::optional<Action>& cell : cells[static_cast<size_t>(place)]) {
    if (cell) {
      actions.push_back(*cell);
    }
  }
  return actions;
}

std::string Schedule::str() const {
  const int32_t stages = segments.isDivided() ? static_cast<int32_t>(segments.counts().size()) : num_stages;
  return name + ": " + std::to_string(stages) + (stages == 1 ? " stage on " : " stages on ") + std::to_string(numPlaces()) +
         (numPlaces() == 1 ? " place, " : " places, ") + std::to_string(num_microbatches) +
         (num_microbatches == 1 ? " microbatch\n" : " microbatches\n") + grid(*this, {0, numColumns(*this)}, nullptr);
}

std::string Schedule::strAround(CellPosition marked) const {
  return grid(*this, {std::max(0, marked.cell - kColumnsAround), marked.cell + kColumnsAround + 1}, &marked);
}

bool Schedule::operator==(const Schedule& other) const {
  return num_stages == other.num_stages && num_microbatches == other.num_microbatches && place_of_stage == other.place_of_stage &&
         cells == other.cells && segments.isDivided() == other.segments.isDivided() && (!segments.isDivided() || segments == other.segments);
}

Schedule dividedInto(const Schedule& schedule, const Segments& segments) {
  if (!segments.isDivided() || schedule.segments.isDivided()) {
    require(!schedule.segments.isDivided() || schedule.segments == segments,
            "schedule '" + schedule.name + "' is an order of other segments than the stages have");
    return schedule;
  }
  Schedule out{schedule.name, 0, schedule.num_microbatches, {}, {}, segments};
  require(segments.counts().size() == static_cast<size_t>(schedule.num_stages), "segments are given for every stage, expected " +
                                                                                    std::to_string(schedule.num_stages) + " stages, got " +
                                                                                    std::to_string(segments.counts().size()));
  for (int32_t stage = 0; stage < schedule.num_stages; ++stage) {
    out.num_stages += segments.countOf(stage);
    out.place_of_stage.resize(static_cast<size_t>(out.num_stages), schedule.place_of_stage[static_cast<size_t>(stage)]);
  }
  for (int32_t place = 0; place < schedule.numPlaces(); ++place) {
    const std::vector<Action> actions = segments.expand(schedule.actionsOf(place));
    out.cells.emplace_back(actions.begin(), actions.end());
  }
  return out;
}

Schedule forwardsOf(const Schedule& schedule) {
  Schedule out = schedule;
  out.name = schedule.name + " (forward only)";
  for (auto& cells : out.cells) {
    std::erase_if(cells, [](const std::optional<Action>& cell) { return !cell || cell->kind != ActionKind::kForward; });
  }
  return out;
}

}  // namespace xmesh::core
