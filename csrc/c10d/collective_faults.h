#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "c10d/life_lines.h"
#include "c10d/open_calls.h"
#include "runtime/failure.h"
#include "runtime/fork_mark.h"

namespace xmesh::c10d_backend {

/// What ends a group's collectives on gloo, and who is to blame.
///
/// gloo tells a rank of a death only where that rank itself exchanges bytes with the dead one. So whoever hears of one first finds out whose it was,
/// tells the other ranks by their life lines, and breaks off its own connections: with that those hear who wait for this rank, and so on. An error
/// that is no sign of a death (arguments of an operation, a timeout) ends no other call.
///
/// Threading: any thread; what waits does so without the interpreter's lock, which nothing here takes. Ownership: shared by the group and its Works.
class CollectiveFaults {
 public:
  /// `global_ranks` of every group rank, in order. `break_off` ends what is in flight here; it may be called on any thread, more than once.
  CollectiveFaults(int rank, std::vector<int64_t> global_ranks, PublishedLifeLine line, std::function<void()> break_off);

  /// Once all ranks have published their life lines: it must know of them before the store may be gone.
  void meet(const c10::intrusive_ptr<::c10d::Store>& store);
  /// Throws what the group's collectives have ended with, if they have. `what`: of the call, for the text.
  void check(const std::string& what) const;
  /// A collective has failed on this rank: it ends all of them if that is a sign of a death, or of a rank that has left. Called when that is noticed,
  /// at once and once for each.
  void collectiveFailed(const std::exception_ptr& error) noexcept;
  /// Calls of this rank's on gloo that look() ends where gloo does not.
  OpenCalls& openCalls() { return open_calls_; }
  /// Finds out what calls that last wait for, one look after the other: a group whose collectives have ended, here or as another rank has told; a
  /// rank that has died; the other end of a send. Breaks off connections, and abandons calls that are open at the next look all the same. One thread.
  void look() noexcept;
  /// Whether gloo may be at a call that has no hope, and be so until its timeout.
  bool mayHaveLostCalls() const;
  /// What a call that failed raises: a PeerError that names who is to blame, else what it failed with; c10::DistNetworkError where connections
  /// failed. `peer`: the group rank that it concerned alone, or -1.
  std::exception_ptr explained(const std::exception_ptr& error, const std::string& what, int peer) noexcept;
  /// Ends the collectives of this rank: they fail with this, if they have not failed before. Nothing in a forked child.
  void end(runtime::Failure failure) noexcept;
  /// As end(), for a rank that gives up by itself; the others hear of it.
  void abort() noexcept;
  /// This rank leaves the group: so it looks to the others from now on. In order: what it was part of goes well for the others, too.
  void leave(bool in_order) noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  class Look;

  /// Who is to blame: as others have told, or as the life lines say within `time`. `peer`: who is to blame alone if it has ended, or -1.
  std::optional<runtime::Failure> findCause(std::chrono::milliseconds time, int peer, bool tells);
  std::optional<runtime::Failure> told();
  /// That the next rank has died, which is told to all others once.
  std::optional<runtime::Failure> lossOfNext();
  /// Whether the other end of a send or receive is gone, so long that what it sent before has come.
  bool isPeerLost(OpenCall& call);
  /// Adds to what frees those who wait.
  void abandon(const OpenCalls::Handle& call, runtime::Failure failure, std::vector<std::function<void()>>& frees);
  runtime::Failure lost(const std::vector<int>& ranks) const;
  void tellOthers(Look& look, const runtime::Failure& failure) const;
  void tellOthers(const runtime::Failure& failure) const;
  std::string here(const std::string& what) const;
  /// The first one counts.
  void settle(std::optional<runtime::Failure> failure);

  const int rank_;
  const std::vector<int64_t> global_ranks_;
  const std::function<void()> break_off_;
  const runtime::ForkMark fork_;
  std::vector<LifeAddress> addresses_;  ///< by group rank; written before the group is used
  const std::string secret_;

  OpenCalls open_calls_;
  std::atomic<bool> has_abandoned_ = false;
  std::unique_ptr<transport::LifeWatch> next_;  ///< the next rank of the group, of the last one the first; look()'s, like what is below
  std::map<int, transport::LifeWatch> peers_;   ///< of sends and receives that lasted, by group rank
  std::optional<runtime::Failure> loss_of_next_;
  bool has_broken_off_ = false;

  std::mutex line_mutex_;  ///< guards line_
  std::unique_ptr<transport::LifeLine> line_;

  mutable std::mutex mutex_;  ///< guards what is below
  std::condition_variable settled_;
  bool has_left_ = false;
  bool is_looking_ = false;
  std::optional<runtime::Failure> failure_;
};

}  // namespace xmesh::c10d_backend
