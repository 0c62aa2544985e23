#pragma once

#include <chrono>
#include <functional>
#include <memory>

namespace xmesh::c10d_backend {

/// Tasks that may block for a peer or a device, even for ever: each runs on a thread of its own, which stays behind where it does. Threading: any
/// thread.
class SideThreads {
 public:
  SideThreads();
  ~SideThreads();
  SideThreads(const SideThreads&) = delete;
  SideThreads& operator=(const SideThreads&) = delete;
  /// Throws std::system_error where no thread can be had. `task` does not throw; what it holds is let go on its thread.
  void run(std::function<void()> task);
  /// Blocks until every task has ended and its thread is gone, for so long at most. Whether all have.
  bool waitFor(std::chrono::milliseconds patience) noexcept;

 private:
  struct State;  ///< shared with the threads, which may outlive this
  const std::shared_ptr<State> state_;
};

}  // namespace xmesh::c10d_backend
