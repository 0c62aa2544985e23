#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "c10d/call_details.h"
#include "c10d/endpoint.h"
#include "c10d/group_attachment.h"
#include "c10d/inner_backends.h"
#include "c10d/members.h"
#include "core/resharding/plan.h"
#include "core/topology.h"
#include "runtime/calls/reshard_service.h"

namespace xmesh::c10d_backend {

/// How a group's reshards run; the same on every rank.
struct ReshardGroupOptions {
  int64_t staging_bytes = int64_t{64} << 20;  ///< most staging memory per rank, all reshards in flight together
  bool is_paced = true;                       ///< pace direct sends on topologies whose rates were measured
  bool shared_memory = true;                  ///< between ranks at one address
  std::string host_id = {};                   ///< which host this rank is on; empty to discover it. May differ from rank to rank.
  bool blocking_wait = false;                 ///< see XmeshOptions
  OwnInnerFactory make_inner = {};            ///< for tensors on a device
};

/// The reshards of one process group on one rank: its members, found through the store, over one endpoint. Made at the first reshard; the store keys
/// and the connections are its own.
/// Threading: calls are begun and refused by one thread at a time (the Python layer sees to it); topology(), prepare(), terms() and close() come
/// from any thread at any time. No method needs the GIL.
class ReshardGroup final : public GroupAttachment {
 public:
  /// `store` is the group's. Publishes where this rank listens. `global_ranks` are those of the group ranks, in order.
  ReshardGroup(c10::intrusive_ptr<::c10d::Store> store, int32_t group_rank, std::vector<int64_t> global_ranks, std::chrono::milliseconds timeout,
               ReshardGroupOptions options);
  ~ReshardGroup() override;
  ReshardGroup(const ReshardGroup&) = delete;
  ReshardGroup& operator=(const ReshardGroup&) = delete;

  int64_t globalRank() const { return endpoint_->globalRank(); }
  /// Which host each of `ranks` (global) is on, as they published it; hosts are numbered in order of their lowest rank. Waits for ranks that have not
  /// made their group yet, up to the timeout; PeerError then. InvalidArgument for a rank outside the group.
  core::Topology topology(const std::vector<int64_t>& ranks, const core::LinkModel& links);
  /// Compiles what this rank does for a plan. Keep it: later calls with the same arguments start from it.
  std::shared_ptr<const runtime::PreparedPlan> prepare(std::shared_ptr<const core::ReshardingPlan> plan, const CallDetails& details) const {
    return endpoint_->prepare(std::move(plan), details);
  }
  /// Options of one call.
  struct CallOptions {
    std::optional<runtime::CallKey> forward;  ///< the call whose backward this is
    bool is_detached = false;                 ///< see ReshardRequest
    bool writes_once_agreed = false;          ///< see Movement
  };
  /// Starts a call: src and dst have one local tensor per tensor of the plan (ignored where this rank is not in the mesh). The memory belongs to the
  /// call until it has ended.
  c10::intrusive_ptr<::c10d::Work> begin(const std::shared_ptr<const runtime::PreparedPlan>& prepared, std::vector<at::Tensor> src,
                                         std::vector<at::Tensor> dst, const CallOptions& call);
  /// What moves the tensors; who begins calls there himself has found their ranks before (arrive()).
  const std::shared_ptr<Endpoint>& endpoint() const { return endpoint_; }
  /// Tells the other participants that this rank refuses its call; see runtime::Refusals::refuse.
  void refuse(std::vector<int64_t> participants, const std::string& text);
  /// The same where only some of the participants (global ranks) are known; see runtime::Refusals::refuseUnnamed.
  void refuseUnnamed(std::vector<int64_t> ranks, const std::string& text);
  /// This rank makes a pipeline of `ranks` (ascending, itself among them), and waits until all of them use the group: the how many-th of these ranks
  /// it is. Throws what is known to be in the way; see runtime::Arrivals.
  uint64_t arrive(const std::vector<int64_t>& ranks);
  /// It could not make a pipeline of `ranks` (any; none where they are not known).
  void refusePipeline(std::vector<int64_t> ranks, const runtime::Failure& failure);
  /// Most staging memory that was allocated at once, in bytes.
  int64_t peakStagingBytes() const { return service().peakStagingBytes(); }

  void setTimeout(std::chrono::milliseconds timeout) { endpoint_->setTimeout(timeout); }
  std::chrono::milliseconds timeout() const { return endpoint_->timeout(); }
  void close(bool abort) noexcept override { endpoint_->close(abort); }

 private:
  runtime::ReshardService& service() const { return endpoint_->service(); }
  void find(const std::vector<int64_t>& ranks) { members_.find(ranks, {timeout()}); }

  const runtime::RankNumbers numbers_;
  const bool blocking_wait_;
  Members members_;
  std::shared_ptr<Endpoint> endpoint_;
};

/// The call behind a Work that ReshardGroup::begin returned, or nothing for other Works.
std::shared_ptr<runtime::ReshardCall> callOf(const c10::intrusive_ptr<::c10d::Work>& work);

}  // namespace xmesh::c10d_backend
