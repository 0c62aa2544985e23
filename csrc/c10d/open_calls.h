#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace xmesh::c10d_backend {

/// What a call on gloo concerns.
struct GuardedCall {
  std::string what;  ///< for error texts: "all_reduce"
  int peer = -1;     ///< for a send or receive, the other group rank
  bool is_collective = true;
  bool is_send = false;
};

/// A call on gloo that has not ended, and may outlast its connections: where one breaks, gloo tells those calls of it whose bytes do not flow yet,
/// and forgets the one in the midst of sending or receiving, which then waits for its timeout. So somebody else may have to end it.
/// Threading: any thread, except what is said to be the watch's.
class OpenCall {
 public:
  /// `give_up` frees those who wait for the call; it may run any code of theirs.
  OpenCall(GuardedCall call, std::function<void(const std::exception_ptr& error)> give_up);

  const GuardedCall& call() const { return call_; }
  /// gloo has ended it. False: it was abandoned before.
  bool settle();
  /// From now on it has ended with this error, whatever gloo still does. What frees those who wait, to be called without locks; null where gloo has
  /// ended it.
  std::function<void()> abandon(const std::exception_ptr& error);
  /// What it was abandoned with, or null.
  std::exception_ptr error() const;

  int num_looks = 0;         ///< the watch's: at which it was open
  int num_looks_at_end = 0;  ///< the watch's: at which it was open though the other end of a send or receive was gone

 private:
  const GuardedCall call_;
  const std::function<void(const std::exception_ptr& error)> give_up_;
  mutable std::mutex mutex_;  ///< guards the two below
  bool is_settled_ = false;
  std::exception_ptr error_;
};

/// Those of one group. Threading: any thread.
class OpenCalls {
 public:
  using Handle = std::shared_ptr<OpenCall>;

  void add(const Handle& call);
  void remove(const Handle& call);
  /// Those that were open at the last look already, which is what a call of this is.
  std::vector<Handle> late();
  bool empty() const;

 private:
  mutable std::mutex mutex_;
  std::set<Handle> calls_;
};

}  // namespace xmesh::c10d_backend
