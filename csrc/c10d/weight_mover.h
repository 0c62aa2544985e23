#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "c10d/endpoint.h"
#include "c10d/watched_transfers.h"
#include "core/weights/manifest.h"
#include "core/weights/match.h"
#include "runtime/link/party.h"

namespace xmesh::c10d_backend {

/// The memory behind a manifest; on the host.
struct LocalWeights {
  std::vector<std::vector<at::Tensor>> held;  ///< by tensor of the manifest, by box
  std::vector<at::Tensor> needed;             ///< by needed box. Of another type than the manifest says it is cast once it has come
};

/// Replicas whose maps do not fit what the source has.
class MisfitError : public std::runtime_error {
 public:
  MisfitError(const std::string& text, std::vector<int32_t> members) : std::runtime_error(text), members_(std::move(members)) {}
  /// All of theirs.
  const std::vector<int32_t>& members() const { return members_; }

 private:
  std::vector<int32_t> members_;
};

/// What this member does to move one version among some parties: waves of planned transfers. Immutable.
class WeightPlan {
 public:
  /// Equal on all members that plan the same.
  const std::string& fingerprint() const { return fingerprint_; }
  int64_t numWaves() const { return static_cast<int64_t>(waves_.size()); }

 private:
  friend class WeightMover;
  /// A part of a box, in elements from its beginning.
  struct Piece {
    core::MatchedBox box;
    core::Box within;
  };
  struct Wave {
    std::shared_ptr<const runtime::PreparedPlan> prepared;
    std::vector<Piece> sources;  ///< by local tensor of the program
    std::vector<Piece> destinations;
  };
  std::vector<int64_t> members_;  ///< ascending numbers
  std::vector<Wave> waves_;
  std::vector<std::pair<int64_t, int64_t>> copies_;  ///< (from, to) among needed boxes
  std::vector<int64_t> held_of_tensor_;              ///< by tensor of the match: which of this member's
  std::string fingerprint_;
};

/// Moves weights between the members of a link. Threading: plan() and move() on one thread, which waits there; abort() on any.
class WeightMover {
 public:
  /// `wave_bytes`: see core::cutIntoWaves.
  WeightMover(std::shared_ptr<Endpoint> endpoint, core::Manifest manifest, LocalWeights weights, int64_t wave_bytes);

  /// Throws MisfitError, alike on all members.
  std::shared_ptr<const WeightPlan> plan(const std::vector<runtime::link::Party>& parties) const;
  /// Returns when this member has sent and received all of the version. Throws what went wrong, within the deadline and the time to ask the others
  /// what they do; what has come by then is partly written, and no memory is used any more.
  void move(const WeightPlan& plan, const runtime::link::Attempt& attempt, std::chrono::milliseconds deadline);
  /// Ends move() of that attempt, on all members.
  void abort(const runtime::link::Attempt& attempt);

 private:
  void moveWaves(const WeightPlan& plan, WatchedTransfers& transfers, std::chrono::steady_clock::time_point deadline) const;

  const std::shared_ptr<Endpoint> endpoint_;
  const core::Manifest manifest_;
  const LocalWeights weights_;
  const int64_t wave_bytes_;
  std::mutex mutex_;  ///< guards what is below
  runtime::link::Attempt moving_;
  std::shared_ptr<WatchedTransfers> transfers_;  ///< of that attempt
};

}  // namespace xmesh::c10d_backend
