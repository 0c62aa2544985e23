#pragma once

#include <vector>

#include "core/resharding/plan.h"

namespace xmesh::core {

/// Decomposes a reshard into unit tasks (AlpaComm, MLSys'23, section 2 and appendix B): fills `holders`, `needers` and `tasks` of a plan
/// that has its tensors. Per dim the pieces of source and destination tiling are intersected; a task is a product of those, so the
/// work is proportional to the number of tasks. Where an end has boxes instead of a mesh, all boxes are cut alike (refineBoxes). Tasks come in
/// row-major order of their boxes, tensor by tensor; empty ones, and what nobody needs, are left out. Throws InvalidArgument naming boxes that nobody
/// holds.
void decompose(ReshardingPlan& plan);

}  // namespace xmesh::core
