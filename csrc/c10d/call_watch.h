#pragma once

#include <memory>

#include "c10d/collective_faults.h"

namespace xmesh::c10d_backend {

/// From now on the group looks at its open calls, twice a second, as long as it is there: on a thread that all groups of the process share, and which
/// is there while they are. Any thread.
void watchCalls(const std::shared_ptr<CollectiveFaults>& group);

}  // namespace xmesh::c10d_backend
