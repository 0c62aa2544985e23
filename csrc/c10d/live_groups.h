#pragma once

#include "c10d/process_group_xmesh.h"

namespace xmesh::c10d_backend {

/// Notes a group that has just been made, for endLiveGroups(), and returns it. Any thread.
c10::intrusive_ptr<ProcessGroupXmesh> noteLive(c10::intrusive_ptr<ProcessGroupXmesh> group);

/// Ends the groups of this process that still are there. Call it before the interpreter ends, without its lock: gloo's threads drop the last
/// references to tensors, and a thread that asks an ending interpreter for its lock is ended in a way that aborts the process. After a failure
/// (`has_failed`) it waits for no peer.
void endLiveGroups(bool has_failed) noexcept;

}  // namespace xmesh::c10d_backend
