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

using WrittenCells = std::vector<std::vector<std::optional<WrittenAction>>>;

std::optional<WrittenAction> parseCell(std::string_view text, size_t row, size_t column) {
  if (text.size() >= 2 && text.front() == '"' && text.back() == '"') {
    text = text.substr(1, text.size() - 2);
  }
  if (text.find_first_not_of(" \t") == std::string_view::npos) {
    return std::nullopt;
  }
  try {
    return WrittenAction::parse(text);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument("schedule, place " + std::to_string(row) + ", cell " + std::to_string(column) + ": " + error.what());
  }
}

/// The segments that cells name. Throws InvalidArgument for a stage that is whole in one cell and has segments in another, or lacks some.
Segments segmentsOf(const WrittenCells& cells) {
  int64_t num_actions = 0;
  int32_t last_stage = -1;
  bool is_divided = false;
  for (const auto& row : cells) {
    for (const std::optional<WrittenAction>& cell : row) {
      if (cell) {
        ++num_actions;
        last_stage = std::max(last_stage, cell->action.stage);
        is_divided = is_divided || cell->segment.has_value();
      }
    }
  }
  if (!is_divided) {
    return {};
  }
  require(last_stage < num_actions, "a schedule has an action for every stage, got stage " + std::to_string(last_stage) + " with only " +
                                        std::to_string(num_actions) + " actions");
  std::vector<int32_t> counts(static_cast<size_t>(last_stage) + 1, 0);
  std::vector<bool> is_whole(counts.size(), false);
  int64_t sum = 0;
  for (const auto& row : cells) {
    for (const std::optional<WrittenAction>& cell : row) {
      if (!cell) {
        continue;
      }
      const auto stage = static_cast<size_t>(cell->action.stage);
      const int32_t segment = cell->segment.value_or(0);
      require(counts[stage] == 0 || is_whole[stage] == !cell->segment.has_value(), "stage " + std::to_string(stage) +
                                                                                       " is divided into segments in one cell (such as " +
                                                                                       std::to_string(stage) + ".0F0) and whole in another");
      require(segment < num_actions, "a schedule has an action for every segment, got segment " + std::to_string(segment) + " of stage " +
                                         std::to_string(stage) + " with only " + std::to_string(num_actions) + " actions");
      is_whole[stage] = !cell->segment.has_value();
      sum += std::max(0, segment + 1 - counts[stage]);
      counts[stage] = std::max(counts[stage], segment + 1);
    }
  }
  require(sum <= num_actions, "a schedule has an action for every segment, got " + std::to_string(sum) + " segments with only " +
                                  std::to_string(num_actions) + " actions");
  for (size_t stage = 0; stage < counts.size(); ++stage) {
    require(counts[stage] > 0, "stage " + std::to_string(stage) + " has no action in the schedule, expected stages 0.." + std::to_string(last_stage));
  }
  return Segments(counts);
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
      require(owner < 0 || owner == place, schedule.segments.nameOf(action.stage) + " belongs to one place, got " + schedule.textOf(action) +
                                               " on place " + std::to_string(place) + " and its other actions on place " + std::to_string(owner));
      owner = place;
    }
  }
  for (int32_t stage = 0; stage < schedule.num_stages; ++stage) {
    require(schedule.place_of_stage[static_cast<size_t>(stage)] >= 0,
            schedule.segments.nameOf(stage) + " has no action in the schedule" +
                (schedule.segments.isDivided() ? std::string() : ", expected stages 0.." + std::to_string(last_stage)));
    const int32_t place = schedule.place_of_stage[static_cast<size_t>(stage)];
    const int32_t first = schedule.place_of_stage[static_cast<size_t>(schedule.segments.firstOf(schedule.segments.stageOf(stage)))];
    require(place == first, "a stage belongs to one place, got " + schedule.segments.nameOf(stage) + " on place " + std::to_string(place) +
                                " and its first segment on place " + std::to_string(first));
  }
}

}  // namespace

std::string scheduleToCsv(const Schedule& schedule) {
  std::string out;
  for (const auto& cells : schedule.cells) {
    for (size_t i = 0; i < cells.size(); ++i) {
      out += (i > 0 ? "," : "") + (cells[i] ? schedule.textOf(*cells[i]) : std::string());
    }
    out += "\r\n";
  }
  return out;
}

Schedule scheduleFromCsv(const std::string& text, const std::string& name) {
  Schedule schedule;
  schedule.name = name;
  const std::vector<std::string_view> lines = split(text, '\n');
  WrittenCells written;
  for (size_t row = 0; row < lines.size(); ++row) {
    std::string_view line = lines[row];
    if (!line.empty() && line.back() == '\r') {
      line.remove_suffix(1);
    }
    auto& cells = written.emplace_back();
    for (std::string_view cell : split(line, ',')) {
      for (const std::string_view part : partsOfPair(cell)) {
        cells.push_back(parseCell(part, row, cells.size()));
      }
    }
  }
  const auto isIdle = [](const auto& cells) { return std::none_of(cells.begin(), cells.end(), [](const auto& cell) { return cell.has_value(); }); };
  while (!written.empty() && isIdle(written.back())) {
    written.pop_back();
  }
  schedule.segments = segmentsOf(written);
  for (const auto& row : written) {
    auto& cells = schedule.cells.emplace_back();
    for (const std::optional<WrittenAction>& cell : row) {
      if (!cell) {
        cells.emplace_back();
        continue;
      }
      cells.emplace_back(cell->action);
      cells.back()->stage = schedule.segments.firstOf(cell->action.stage) + cell->segment.value_or(0);
    }
  }
  inferShape(schedule);
  return schedule;
}

}  // namespace xmesh::core
