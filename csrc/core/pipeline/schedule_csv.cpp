#include <algorithm>
#include <string_view>

#include "core/error.h"
#include "core/pipeline/schedule.h"

namespace xmesh::core {
namespace {

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) {
      return parts;
    }
    text.remove_prefix(end + 1);
  }
}

/// The parts of torch's "(0F1;3B0)OVERLAP_F_B", or the text itself.
std::vector<std::string_view> partsOfPair(std::string_view text) {
  constexpr std::string_view kEnd = ")OVERLAP_F_B";
  const size_t first = text.find_first_not_of(" \t");
  const size_t last = text.find_last_not_of(" \t");
  if (first == std::string_view::npos || text[first] != '(' || !text.substr(0, last + 1).ends_with(kEnd)) {
    return {text};
  }
  return split(text.substr(first + 1, last + 1 - kEnd.size() - first - 1), ';');
}

std::optional<Action> parseCell(std::string_view text, size_t row, size_t column) {
  if (text.size() >= 2 && text.front() == '"' && text.back() == '"') {
    text = text.substr(1, text.size() - 2);
  }
  if (text.find_first_not_of(" \t") == std::string_view::npos) {
    return std::nullopt;
  }
  try {
    return Action::parse(text);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument("schedule, place " + std::to_string(row) + ", cell " + std::to_string(column) + ": " + error.what());
  }
}

/// Stages, microbatches and the stages' places, from the cells.
void inferShape(Schedule& schedule) {
  int64_t num_actions = 0;
  int32_t last_stage = -1;
  for (const auto& cells : schedule.cells) {
    for (const std::optional<Action>& cell : cells) {
      if (cell) {
        ++num_actions;
        last_stage = std::max(last_stage, cell->stage);
        schedule.num_microbatches = std::max(schedule.num_microbatches, cell->microbatch == INT32_MAX ? INT32_MAX : cell->microbatch + 1);
      }
    }
  }
  require(num_actions > 0, "a schedule has at least one action, got none");
  require((int64_t{last_stage} + 1) * schedule.num_microbatches <= num_actions,
          "a schedule has an action for every stage and microbatch, got stage " + std::to_string(last_stage) + " and " +
              std::to_string(schedule.num_microbatches) + " microbatches with only " + std::to_string(num_actions) + " actions");
  schedule.num_stages = last_stage + 1;
  schedule.place_of_stage.assign(static_cast<size_t>(schedule.num_stages), -1);
  for (int32_t place = 0; place < schedule.numPlaces(); ++place) {
    for (const Action& action : schedule.actionsOf(place)) {
      int32_t& owner = schedule.place_of_stage[static_cast<size_t>(action.stage)];
      require(owner < 0 || owner == place, "stage " + std::to_string(action.stage) + " belongs to one place, got " + action.str() + " on place " +
                                               std::to_string(place) + " and its other actions on place " + std::to_string(owner));
      owner = place;
    }
  }
  for (int32_t stage = 0; stage < schedule.num_stages; ++stage) {
    require(schedule.place_of_stage[static_cast<size_t>(stage)] >= 0,
            "stage " + std::to_string(stage) + " has no action in the schedule, expected stages 0.." + std::to_string(last_stage));
  }
}

}  // namespace

std::string scheduleToCsv(const Schedule& schedule) {
  std::string out;
  for (const auto& cells : schedule.cells) {
    for (size_t i = 0; i < cells.size(); ++i) {
      out += (i > 0 ? "," : "") + (cells[i] ? cells[i]->str() : std::string());
    }
    out += "\r\n";
  }
  return out;
}

Schedule scheduleFromCsv(const std::string& text, const std::string& name) {
  Schedule schedule;
  schedule.name = name;
  const std::vector<std::string_view> lines = split(text, '\n');
  for (size_t row = 0; row < lines.size(); ++row) {
    std::string_view line = lines[row];
    if (!line.empty() && line.back() == '\r') {
      line.remove_suffix(1);
    }
    std::vector<std::optional<Action>> cells;
    for (std::string_view cell : split(line, ',')) {
      for (const std::string_view part : partsOfPair(cell)) {
        cells.push_back(parseCell(part, row, cells.size()));
      }
    }
    schedule.cells.push_back(std::move(cells));
  }
  const auto isIdle = [](const std::vector<std::optional<Action>>& cells) {
    return std::none_of(cells.begin(), cells.end(), [](const std::optional<Action>& cell) { return cell.has_value(); });
  };
  while (!schedule.cells.empty() && isIdle(schedule.cells.back())) {
    schedule.cells.pop_back();
  }
  inferShape(schedule);
  return schedule;
}

}  // namespace xmesh::core
