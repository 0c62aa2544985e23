#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/pipeline/action.h"
#include "core/pipeline/segments.h"

namespace xmesh::core {

/// Where an action stands in a schedule.
struct CellPosition {
  int32_t place = 0;
  int32_t cell = 0;
};

/// Which place computes what in which order. A place is one position of the pipeline: the ranks that run one list together (a stage's mesh; several
/// stages where they share it). A place runs its actions strictly in the order of its cells; an empty cell is an idle unit of time in
/// the picture and waits for nothing. An order of segments has their numbers in place of stages' everywhere but where it is written. Plain value:
/// treat it as immutable once made; safe to share between threads then.
struct Schedule {
  std::string name;  ///< for people; not part of equality
  int32_t num_stages = 0;
  int32_t num_microbatches = 0;
  std::vector<int32_t> place_of_stage;
  std::vector<std::vector<std::optional<Action>>> cells;  ///< by place
  Segments segments{};                                    ///< divided: cells are of segments

  int32_t numPlaces() const { return static_cast<int32_t>(cells.size()); }
  /// Ascending.
  std::vector<int32_t> stagesOf(int32_t place) const;
  /// A place's cells without the empty ones.
  std::vector<Action> actionsOf(int32_t place) const;
  /// As the grid and the file have it: "2F0", or "2.14F0" of a segment.
  std::string textOf(const Action& action) const { return segments.textOf(action); }
  /// A grid: one row per place, one column per cell, "." where idle; "F0" where a place has one stage, torch's "2F0" where one has several, "2.14F0"
  /// of a segment.
  std::string str() const;
  /// The grid around a cell, which stands between > and <.
  std::string strAround(CellPosition marked) const;

  bool operator==(const Schedule& other) const;
};

/// One row per place, cells joined by commas, empty where idle: the file that torch.distributed.pipelining writes and reads ("compute_only"). A
/// segment of a stage stands behind its number: "2.14F0".
std::string scheduleToCsv(const Schedule& schedule);
/// Reads scheduleToCsv() or torch's file; either line end. An overlapped pair of torch's, "(0F1;3B0)OVERLAP_F_B", is its actions one after the
/// other. Stages, microbatches and who has which stage follow from the cells. Throws
/// InvalidArgument naming row and column of a cell that is no action, a stage on two places, or a stage or segment without action. Says nothing
/// about the order: validateSchedule() does.
Schedule scheduleFromCsv(const std::string& text, const std::string& name = "csv");

/// The same with each action of a stage as those of its segments, one after the other; as it is where they are segments' already. Throws
/// InvalidArgument where it has segments of its own, others.
Schedule dividedInto(const Schedule& schedule, const Segments& segments);

/// Forwards only, in the same order: what an evaluation runs.
Schedule forwardsOf(const Schedule& schedule);

}  // namespace xmesh::core
