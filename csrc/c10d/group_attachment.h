#pragma once

namespace xmesh::c10d_backend {

/// Something that lives as long as a process group does, such as the service that reshards over it.
/// Ownership: the group holds it; close() is called once, before the group's inner backends end.
class GroupAttachment {
 public:
  virtual ~GroupAttachment() = default;
  /// Ends all that runs, joins its threads, and frees what it holds. `abort`: without waiting for peers. Called without the GIL, on any thread.
  virtual void close(bool abort) noexcept = 0;
};

}  // namespace xmesh::c10d_backend
