#include "c10d/reshard_group.h"

#include <algorithm>
#include <future>
#include <utility>

#include "c10d/life_lines.h"
#include "c10d/reshard_work.h"
#include "c10d/stores.h"
#include "runtime/interrupts.h"
#include "transport/local_address.h"

namespace xmesh::c10d_backend {
namespace {

constexpr std::chrono::milliseconds kLook{100};  ///< at signals, while something is waited for

void sortUnique(std::vector<int64_t>& ranks) {
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
}

/// Until it is ready, or the time is over (0: never).
void waitAtMost(std::chrono::milliseconds timeout, const std::future<void>& ready) {
  const auto begin = std::chrono::steady_clock::now();
  while (ready.wait_for(kLook) != std::future_status::ready && (timeout.count() == 0 || std::chrono::steady_clock::now() < begin + timeout)) {
    runtime::checkInterrupts();
  }
}

/// What a group has on devices: communicators that are made through its store.
std::shared_ptr<DeviceLines> linesOf(const c10::intrusive_ptr<::c10d::Store>& store, const OwnInnerFactory& make, const std::string& token) {
  const auto communicator = [make, store](c10::Device device, const std::string& name, int rank, const std::vector<int64_t>& global_ranks) {
    TORCH_CHECK_NOT_IMPLEMENTED(make, "xmesh: nothing here carries tensors on ", device);
    return make(device, ownClient(store), name, rank, global_ranks);
  };
  return std::make_shared<DeviceLines>(communicator, runtime::hashBytes(token));
}

}  // namespace

ReshardGroup::ReshardGroup(c10::intrusive_ptr<::c10d::Store> store, int32_t group_rank, std::vector<int64_t> global_ranks,
                           std::chrono::milliseconds timeout, ReshardGroupOptions options)
    : numbers_(std::move(global_ranks)),
      blocking_wait_(options.blocking_wait),
      members_(store, numbers_, group_rank, [this](int32_t peer, const std::string& address) { service().setAddress(peer, address); }) {
  EndpointOptions moving{options.staging_bytes, options.is_paced, options.shared_memory, agreeOnToken(*members_.store()),
                         transport::localAddress(storeHost(store))};
  std::shared_ptr<DeviceLines> lines = linesOf(members_.store(), options.make_inner, moving.token);
  endpoint_ = std::make_shared<Endpoint>(numbers_, group_rank, timeout, std::move(moving), std::move(lines));
  members_.publish(service().address(), options.host_id);
}

ReshardGroup::~ReshardGroup() { close(false); }

core::Topology ReshardGroup::topology(const std::vector<int64_t>& ranks, const core::LinkModel& links) {
  find(ranks);
  return members_.topology(ranks, links);
}

c10::intrusive_ptr<::c10d::Work> ReshardGroup::begin(const std::shared_ptr<const runtime::PreparedPlan>& prepared, std::vector<at::Tensor> src,
                                                     std::vector<at::Tensor> dst, const CallOptions& call) {
  const runtime::Participants& participants = prepared->terms.participants;
  find(participants.ranks);
  runtime::ReshardRequest request;
  CallMovement moving = endpoint_->movements().of(prepared, src, dst);
  request.movement = std::move(moving.movement);
  request.timeout = timeout();
  request.movement.writes_once_agreed = call.writes_once_agreed;
  request.is_detached = call.is_detached;
  request.lane = call.forward.has_value() ? runtime::backwardLane(*call.forward) : 0;
  if (!call.forward.has_value() && service().refusals().size() > 0) {
    waitAtMost(request.timeout, service().refusals().settle(participants));
  }
  return c10::make_intrusive<ReshardWork>(service().reshard(std::move(request)), std::move(dst), std::move(moving.on_device), blocking_wait_);
}

void ReshardGroup::refuse(std::vector<int64_t> participants, const std::string& text) {
  sortUnique(participants);
  if (members_.areMembers(participants) && std::binary_search(participants.begin(), participants.end(), globalRank())) {
    members_.findPresent(participants);
    service().refusals().refuse(participants, numbers_.peersOf(participants), text);
  }
}

void ReshardGroup::refuseUnnamed(std::vector<int64_t> ranks, const std::string& text) {
  sortUnique(ranks);
  if (members_.areMembers(ranks)) {
    members_.findPresent(numbers_.globalRanks());
    service().refusals().refuseUnnamed(ranks, numbers_.peersOf(numbers_.globalRanks()), text);
  }
}

uint64_t ReshardGroup::arrive(const std::vector<int64_t>& ranks) {
  members_.findPresent(ranks);
  waitAtMost(timeout(), service().arrivals().settleFailed(numbers_.peersOf(ranks)));
  const uint64_t count = service().arrivals().arrive(ranks, numbers_.peersOf(ranks));
  std::optional<runtime::Failure> known;
  try {
    members_.find(ranks, {timeout(), Members::AwaitedFor::kPipeline, [&] {
                            known = service().arrivals().failureBefore(ranks, count);
                            if (known.has_value()) {
                              runtime::throwFailure(*known);
                            }
                          }});
  } catch (const runtime::PeerError& error) {
    const runtime::Failure lost{runtime::FailureKind::kPeer, error.what(), error.globalRanks()};
    service().arrivals().abandon(ranks, count, numbers_.peersOf(ranks), known.value_or(lost));
    throw;
  } catch (const std::exception& error) {
    const runtime::Failure other{runtime::FailureKind::kGroup, error.what(), {}};
    service().arrivals().abandon(ranks, count, numbers_.peersOf(ranks), known.value_or(other));
    throw;
  }
  return count;
}

void ReshardGroup::refusePipeline(std::vector<int64_t> ranks, const runtime::Failure& failure) {
  sortUnique(ranks);
  if (!members_.areMembers(ranks)) {
    ranks.clear();
  }
  members_.findPresent(numbers_.globalRanks());
  if (std::binary_search(ranks.begin(), ranks.end(), globalRank())) {
    waitAtMost(timeout(), service().arrivals().settleFailed(numbers_.peersOf(ranks)));
    const uint64_t count = service().arrivals().arrive(ranks, numbers_.peersOf(ranks));
    service().arrivals().abandon(ranks, count, numbers_.peersOf(ranks), failure);
  } else {
    service().arrivals().arrive(ranks, numbers_.peersOf(numbers_.globalRanks()), failure);
  }
}

std::shared_ptr<runtime::ReshardCall> callOf(const c10::intrusive_ptr<::c10d::Work>& work) {
  const auto* reshard = dynamic_cast<ReshardWork*>(work.get());
  return reshard == nullptr ? nullptr : reshard->call();
}

}  // namespace xmesh::c10d_backend
