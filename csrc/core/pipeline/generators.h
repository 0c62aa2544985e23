#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/pipeline/schedule.h"

namespace xmesh::core {

/// What a generator is given. Checked by makeSchedule(): positive numbers, one place per stage, places 0..p-1 each with a stage.
struct PipelineShape {
  int32_t num_stages = 0;
  int32_t num_microbatches = 0;
  std::vector<int32_t> place_of_stage;

  int32_t numPlaces() const;
};

/// A schedule by name, one of scheduleNames(). `place_of_stage` empty: stage s on place s. Any number of microbatches,
/// fewer than stages too. Empty cells stand where a place would idle if every action took one unit of time and communication none. Throws
/// InvalidArgument for an unknown name (the known ones are listed), a shape that is none, or one that the schedule cannot be made for, with the
/// reason.
Schedule makeSchedule(const std::string& name, int32_t num_stages, int32_t num_microbatches, std::vector<int32_t> place_of_stage = {});
/// The names makeSchedule() knows, in the order of the documentation.
std::vector<std::string> scheduleNames();

/// All forwards, then all backwards (Huang et al., 2019). A place with several stages: its stages' forwards one stage after the other, its backwards
/// in the reverse order of stages.
Schedule gpipe(const PipelineShape& shape);
/// Stage i of n starts with min(m, n - i) forwards, then alternates (Narayanan et al., 2021): that many microbatches are in flight at most. Where
/// places have several stages, n - i counts the runs of neighboring stages on one place (`depths`); a place runs a backward as soon as one is ready,
/// else the forward of its latest stage that is.
Schedule oneFOneB(const PipelineShape& shape);
/// Stage i of n starts with min(m, 2(n - i) - 1) forwards, then alternates (AlpaComm, section 4): one more action stands between producing a value
/// and using it on the next stage, under which its transfer hides. Several stages per place: as in 1f1b, with this bound.
Schedule eagerOneFOneB(const PipelineShape& shape);
/// Stage s on place s mod p, v stages per place (Narayanan et al., 2021, section 2.2). Microbatches go in max(1, m / p) rounds of equal size, the
/// first ones one larger where m does not divide; for those that divide it is the order of torch's ScheduleInterleaved1F1B. Other places (a V,
/// uneven ones) take the same rounds: a ready backward first, else the ready forward of the earliest round, and there of the earliest stage; each
/// stage with as many microbatches in flight as in eager_1f1b.
Schedule interleavedOneFOneB(const PipelineShape& shape);

/// 1f1b with split backwards (ZB-H1; Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.3): I in place of B, and stage i's W waits for i
/// later I, so that every stage holds as many microbatches as 1f1b's first one. With equal F, I and W the bubble is a third of 1f1b's: (n - 1)(T_F +
/// T_I - T_W).
///
Schedule zeroBubbleH1(const PipelineShape& shape);
/// I first, then F, W in waits ("backward weight delaying", AlpaComm, section 4), with at most 2n microbatches between F and W on every stage; n
/// counts as in 1f1b. Planned for transfers of one unit of time, so that they hide under F and W.
Schedule eagerSplit(const PipelineShape& shape);
/// interleaved_1f1b with split backwards: F and I in its order, W in waits, and where a stage holds as many microbatches as any does there.
Schedule interleavedZeroBubble(const PipelineShape& shape);
/// Two stages per place in a V, s and 2p - 1 - s on place s (ZB-V; Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 6): with equal F, I and
/// W no place waits once it has begun, in the memory of 1f1b with stages of twice the size. Other places: as zb_h1, by what is ready.
Schedule zeroBubbleV(const PipelineShape& shape);
/// All forwards, stage by stage, then all backwards, the last microbatch first (Lamy-Poirier, Breadth-First Pipeline Parallelism, 2023).
Schedule loopedBfs(const PipelineShape& shape);

/// What a place prefers among what is ready.
struct ReadyRule {
  std::vector<int32_t> most_in_flight;  ///< by stage, positive: a forward beyond it is not ready
  /// By microbatch, ascending: earlier rounds first, and in a round the earliest stage's forward. Empty: the latest stage's forward.
  std::vector<int32_t> round_of_microbatch;
};
/// Each place runs what is ready, backwards first (of the earliest round, there of the latest stage), when every action takes one unit of time and
/// communication none. Takes any places.
Schedule asReady(const std::string& name, const PipelineShape& shape, const ReadyRule& rule);
/// By stage: how many runs of neighboring stages on one place begin with its own and end with the last; n - i where each has a place of its own.
std::vector<int32_t> depths(const PipelineShape& shape);
/// The same lists, each action moved to the earliest cell that its dependencies (stages as a chain) allow when every action takes one cell.
/// Throws InvalidArgument for a schedule that deadlocks.
Schedule alignCells(const Schedule& schedule);

}  // namespace xmesh::core
