#pragma once

#include <vector>

#include "core/pipeline/action_table.h"

namespace xmesh::core {

struct ScheduleCheck {
  /// Every stage and microbatch has its F and no backward: what an evaluation runs.
  bool is_forward_only = false;
};

/// Throws InvalidArgument with the grid around the bad cell, which is marked, unless the schedule can run over these edges:
/// - complete: F once per stage and microbatch, and either B once or I and W once; each on its stage's place;
/// - ordered on every place: F before B or I, I before W, and F (B or I) of a stage after that of the stages of the same place that it waits for;
/// - free of deadlock with buffered sends: places run their lists in order and an action waits only for the values that it uses;
/// - free of deadlock with rendezvous in order: there is one communicator per edge and direction, on which the sender enqueues in the order
///   of the producing actions and the receiver in the order of the using ones. The k-th send meets the k-th receive, so both orders must be the
///   same. Where they are, this adds no wait to the buffered run: a send's predecessors stem from actions before its own producer.
void validateSchedule(const Schedule& schedule, const std::vector<StageEdge>& edges, ScheduleCheck check = {});

}  // namespace xmesh::core
