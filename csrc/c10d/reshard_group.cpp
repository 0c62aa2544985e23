#include "c10d/reshard_group.h"

#include <algorithm>
#include <iterator>
#include <random>
#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "c10d/call_details.h"
#include "c10d/reshard_work.h"
#include "core/error.h"
#include "core/resharding/fingerprint.h"
#include "runtime/agreement/messages.h"
#include "runtime/host/host_executors.h"
#include "runtime/host/mirrored_executors.h"
#include "runtime/interrupts.h"
#include "transport/local_address.h"
#include "transport/tcp/network.h"

namespace xmesh::c10d_backend {
namespace {

constexpr std::chrono::milliseconds kConnectTimeout{30'000};
constexpr std::chrono::milliseconds kLongestDrain{30'000};
constexpr std::chrono::milliseconds kFirstLook{1};  ///< at ranks that are not there yet; then twice that, and so on
constexpr std::chrono::milliseconds kLastLook{100};
constexpr int64_t kMessagesPerStaging = 16;  ///< a message is at most this part of the staging bound

std::vector<uint8_t> bytesOf(const std::string& text) { return {text.begin(), text.end()}; }

std::string randomToken() {
  std::random_device device;
  std::string token;
  for (int i = 0; i < 16; ++i) {
    token += static_cast<char>(device() & 0xffU);
  }
  return token;
}

/// The token all members present to each other: the first one to ask makes it.
std::string agreeOnToken(::c10d::Store& store) {
  const std::vector<uint8_t> agreed = store.compareSet("token", std::vector<uint8_t>{}, bytesOf(randomToken()));
  return {agreed.begin(), agreed.end()};
}

/// A client of the same store for the line's thread: one client serves one request at a time, and another thread may wait in it for long.
c10::intrusive_ptr<::c10d::Store> ownConnection(const c10::intrusive_ptr<::c10d::Store>& store) {
  try {
    return store->clone();
  } catch (const std::exception&) {
    return store;  // no second client can be had
  }
}

void sortUnique(std::vector<int64_t>& ranks) {
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
}

std::string memberKey(int32_t group_rank) { return "member/" + std::to_string(group_rank); }

/// Until it is ready, or the time is over (0: never).
void waitAtMost(std::chrono::milliseconds timeout, const std::future<void>& ready) {
  const auto begin = std::chrono::steady_clock::now();
  while (ready.wait_for(kLastLook) != std::future_status::ready && (timeout.count() == 0 || std::chrono::steady_clock::now() < begin + timeout)) {
    runtime::checkInterrupts();
  }
}

/// TCP, told whom to bind to and whom to admit, for control and for cpu tensors; made inside the service, which it reports to.
runtime::ReshardService::MakeNetworks networksMaker(int32_t group_rank, int32_t group_size, std::string host, std::string token,
                                                    const ReshardGroupOptions& group_options, std::shared_ptr<DeviceLines> lines) {
  return [=](transport::PeerEvents& events) {
    transport::TcpNetworkOptions options;
    options.group_rank = group_rank;
    options.group_size = group_size;
    options.listen_host = host;
    std::copy_n(token.begin(), std::min(token.size(), options.token.size()), options.token.begin());
    options.shared_memory = group_options.shared_memory;
    options.connect_timeout = kConnectTimeout;
    auto network = std::make_unique<transport::TcpNetwork>(options, events);
    std::string address = network->address();
    auto on_host = std::make_unique<runtime::HostExecutors>(*network, group_options.staging_bytes);
    const auto on_devices = [lines, network = network.get(),
                             host = on_host.get()](const runtime::Route& route) -> std::unique_ptr<runtime::Executors> {
      const auto post = [network](std::function<void()> task) { network->post(std::move(task)); };
      if (route.through_host) {
        return std::make_unique<runtime::MirroredExecutors>(*host, post);
      }
      return lines->executors(route, post);
    };
    auto executors = std::make_unique<runtime::ExecutorsByRoute>(std::move(on_host), on_devices);
    return runtime::ReshardService::Networks{std::move(network), std::move(executors), std::move(address)};
  };
}

}  // namespace

ReshardGroup::ReshardGroup(c10::intrusive_ptr<::c10d::Store> store, int32_t group_rank, std::vector<int64_t> global_ranks,
                           std::chrono::milliseconds timeout, ReshardGroupOptions options)
    : store_(c10::make_intrusive<::c10d::PrefixStore>("xmesh/reshard", store)),
      group_rank_(group_rank),
      global_ranks_(std::move(global_ranks)),
      timeout_(timeout),
      options_(options),
      group_store_(store) {
  for (size_t i = 0; i < global_ranks_.size(); ++i) {
    group_rank_of_[global_ranks_[i]] = static_cast<int32_t>(i);
  }
  core::require(options_.staging_bytes >= 4096, "staging_bytes must be at least 4096, got " + std::to_string(options_.staging_bytes));
  const std::string token = agreeOnToken(*store_);
  lines_ = std::make_shared<DeviceLines>(
      [make = options_.make_inner, store = store_](c10::Device device, const std::string& name, int rank, const std::vector<int64_t>& global_ranks) {
        TORCH_CHECK_NOT_IMPLEMENTED(make, "xmesh: nothing here carries tensors on ", device);
        return make(device, ownConnection(store), name, rank, global_ranks);
      },
      runtime::hashBytes(token));
  movements_ = std::make_unique<Movements>(lines_);
  service_ = std::make_unique<runtime::ReshardService>(
      runtime::ReshardService::Options{global_ranks_, group_rank_},
      networksMaker(group_rank_, static_cast<int32_t>(global_ranks_.size()), transport::localAddress(storeHost(store)), token, options_, lines_));
  store_->set(memberKey(group_rank_), bytesOf(service_->address() + " " + (options_.host_id.empty() ? transport::hostIdentity() : options_.host_id)));
}

ReshardGroup::~ReshardGroup() { close(false); }

int32_t ReshardGroup::groupRankOf(int64_t global_rank) const {
  const auto found = group_rank_of_.find(global_rank);
  core::require(found != group_rank_of_.end(), "rank " + std::to_string(global_rank) + " of a mesh is not in the process group");
  return found->second;
}

std::vector<int32_t> ReshardGroup::peersOf(const std::vector<int64_t>& ranks) const {
  std::vector<int32_t> out;
  for (const int64_t rank : ranks) {
    out.push_back(groupRankOf(rank));
  }
  return out;
}

bool ReshardGroup::isFound(int64_t rank) const {
  const std::lock_guard lock(members_mutex_);
  return members_.contains(rank);
}

void ReshardGroup::awaitMembers(std::vector<int64_t> missing, AwaitedFor why, const std::function<void()>& check) {
  LifeWatches lives(group_store_);
  const std::chrono::milliseconds limit = timeout();
  const auto deadline = std::chrono::steady_clock::now() + limit;
  for (std::chrono::milliseconds pause = kFirstLook; !missing.empty(); pause = std::min(2 * pause, kLastLook)) {
    std::vector<int64_t> gone;
    try {
      std::erase_if(missing, [this](int64_t rank) { return store_->check({memberKey(groupRankOf(rank))}); });
      std::copy_if(missing.begin(), missing.end(), std::back_inserter(gone), [&](int64_t rank) { return lives.isGone(groupRankOf(rank)); });
      std::erase_if(gone, [this](int64_t rank) { return store_->check({memberKey(groupRankOf(rank))}); });  // came, then left
    } catch (const std::exception& error) {
      throw runtime::PeerError("the store, by which the ranks of a group find each other, is gone: " + std::string(error.what()), {});
    }
    const std::string here = "on rank " + std::to_string(globalRank()) + ": rank ";
    const std::string step = why == AwaitedFor::kPipeline ? "made the pipeline that this rank makes" : "called any reshard";
    if (!gone.empty()) {
      throw runtime::PeerError(here + runtime::rankList(gone) + " has left the group, or ended, without having " + step + " on it", gone);
    }
    if (missing.empty()) {
      return;
    }
    runtime::checkInterrupts();
    if (check) {
      check();
    }
    if (limit.count() > 0 && std::chrono::steady_clock::now() >= deadline) {
      throw runtime::PeerError(
          here + runtime::rankList(missing) + " has not " + step + " on this group within " + std::to_string(limit.count()) + " ms", missing);
    }
    std::this_thread::sleep_for(pause);
  }
}

void ReshardGroup::findMembers(const std::vector<int64_t>& ranks, AwaitedFor why, const std::function<void()>& check) {
  std::vector<int64_t> missing;
  for (const int64_t rank : ranks) {
    groupRankOf(rank);
    if (!isFound(rank)) {
      missing.push_back(rank);
    }
  }
  awaitMembers(missing, why, check);
  for (size_t i = 0; i < missing.size(); ++i) {
    const std::vector<uint8_t> record = store_->get(memberKey(groupRankOf(missing[i])));
    const std::string text(record.begin(), record.end());
    const size_t space = text.find(' ');
    if (const int32_t peer = groupRankOf(missing[i]); peer != group_rank_) {
      service_->setAddress(peer, text.substr(0, space));
    }
    const std::lock_guard lock(members_mutex_);
    members_[missing[i]] = {text.substr(space + 1)};
  }
}

core::Topology ReshardGroup::topology(const std::vector<int64_t>& ranks, const core::LinkModel& links) {
  findMembers(ranks);
  std::vector<int64_t> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  std::map<std::string, int64_t> index_of_host;
  std::map<int64_t, int64_t> host_of;
  const std::lock_guard lock(members_mutex_);
  for (const int64_t rank : sorted) {
    host_of[rank] = index_of_host.try_emplace(members_.at(rank).host, static_cast<int64_t>(index_of_host.size())).first->second;
  }
  return core::Topology(std::move(host_of), links);
}

std::shared_ptr<const runtime::PreparedPlan> ReshardGroup::prepare(std::shared_ptr<const core::ReshardingPlan> plan,
                                                                   const CallDetails& details) const {
  auto out = std::make_shared<runtime::PreparedPlan>();
  out->devices.resize(plan->tensors.size());
  std::transform(details.devices.begin(), details.devices.end(), out->devices.begin(), kindsOf);
  runtime::ProgramOptions options;
  options.max_message_bytes = std::min<int64_t>(int64_t{4} << 20, options_.staging_bytes / kMessagesPerStaging);
  int64_t agreed_staging_bytes = options.max_message_bytes * kMessagesPerStaging;
  out->through_host = details.through_host || moveThroughHost(out->devices);
  if (!out->through_host) {
    agreed_staging_bytes = options_.staging_bytes;
    options.broadcasts = core::parseStrategy(plan->strategy).isCollective();
    options.groups = runtime::GroupLimits{agreed_staging_bytes, options.max_message_bytes};
  }
  out->terms.participants = participantsOf(plan->participants());
  out->program = runtime::compileProgram(*plan, globalRank(), options);
  out->program_peers = peersOf(out->program->peers());
  for (const std::vector<int64_t>& circle : out->program->circles) {
    const bool is_in_it = std::binary_search(circle.begin(), circle.end(), globalRank());
    out->circles.push_back(is_in_it ? std::optional(participantsOf(circle)) : std::nullopt);
  }
  if (options_.is_paced) {
    for (const auto& [rank, bytes_per_s] : runtime::pacingRates(*plan, globalRank())) {
      out->pacing.emplace_back(groupRankOf(rank), bytes_per_s);
    }
  }
  out->terms.fields = runtime::packFields(fieldsOf(*plan, details, agreed_staging_bytes));
  out->terms.fingerprint = core::planFingerprint(*plan) + std::to_string(runtime::hashBytes(out->terms.fields));
  out->terms.summary = summaryOf(*plan, details);
  out->plan = std::move(plan);
  return out;
}

runtime::Participants ReshardGroup::participantsOf(std::vector<int64_t> ranks) const {
  runtime::Participants out;
  const auto me = std::find(ranks.begin(), ranks.end(), globalRank());
  core::require(me != ranks.end(), "rank " + std::to_string(globalRank()) + " is not one of ranks " + runtime::rankList(ranks));
  out.my_index = me - ranks.begin();
  out.peers = peersOf(ranks);
  out.hash = runtime::hashRanks(ranks);
  out.ranks = std::move(ranks);
  return out;
}

std::shared_ptr<const runtime::CallTerms> ReshardGroup::terms(std::vector<int64_t> ranks, const runtime::CallFields& fields, std::string summary) {
  findMembers(ranks);
  auto out = std::make_shared<runtime::CallTerms>();
  out->participants = participantsOf(std::move(ranks));
  out->fields = runtime::packFields(fields);
  out->fingerprint = std::to_string(runtime::hashBytes(out->fields));
  out->summary = std::move(summary);
  return out;
}

c10::intrusive_ptr<::c10d::Work> ReshardGroup::begin(const std::shared_ptr<const runtime::PreparedPlan>& prepared, std::vector<at::Tensor> src,
                                                     std::vector<at::Tensor> dst, const CallOptions& call) {
  const runtime::Participants& participants = prepared->terms.participants;
  findMembers(participants.ranks);
  runtime::ReshardRequest request;
  CallMovement moving = movements_->of(prepared, src, dst);
  request.movement = std::move(moving.movement);
  request.timeout = timeout();
  request.movement.writes_once_agreed = call.writes_once_agreed;
  request.is_detached = call.is_detached;
  request.lane = call.forward.has_value() ? runtime::backwardLane(*call.forward) : 0;
  if (!call.forward.has_value() && service_->refusals().size() > 0) {
    waitAtMost(request.timeout, service_->refusals().settle(participants));
  }
  return c10::make_intrusive<ReshardWork>(service_->reshard(std::move(request)), std::move(dst), std::move(moving.on_device), options_.blocking_wait);
}

void ReshardGroup::findPresentMembers(const std::vector<int64_t>& ranks) {
  std::vector<int64_t> present;
  for (const int64_t rank : ranks) {
    if (isFound(rank) || store_->check({memberKey(groupRankOf(rank))})) {
      present.push_back(rank);
    }
  }
  findMembers(present);
}

bool ReshardGroup::areMembers(const std::vector<int64_t>& ranks) const {
  return std::all_of(ranks.begin(), ranks.end(), [this](int64_t rank) { return group_rank_of_.contains(rank); });
}

void ReshardGroup::refuse(std::vector<int64_t> participants, const std::string& text) {
  sortUnique(participants);
  if (areMembers(participants) && std::binary_search(participants.begin(), participants.end(), globalRank())) {
    findPresentMembers(participants);
    service_->refusals().refuse(participants, peersOf(participants), text);
  }
}

void ReshardGroup::refuseUnnamed(std::vector<int64_t> ranks, const std::string& text) {
  sortUnique(ranks);
  if (areMembers(ranks)) {
    findPresentMembers(global_ranks_);
    service_->refusals().refuseUnnamed(ranks, peersOf(global_ranks_), text);
  }
}

uint64_t ReshardGroup::arrive(const std::vector<int64_t>& ranks) {
  findPresentMembers(ranks);
  waitAtMost(timeout(), service_->arrivals().settleFailed(peersOf(ranks)));
  const uint64_t count = service_->arrivals().arrive(ranks, peersOf(ranks));
  std::optional<runtime::Failure> known;
  try {
    findMembers(ranks, AwaitedFor::kPipeline, [&] {
      known = service_->arrivals().failureBefore(ranks, count);
      if (known.has_value()) {
        runtime::throwFailure(*known);
      }
    });
  } catch (const runtime::PeerError& error) {
    const runtime::Failure lost{runtime::FailureKind::kPeer, error.what(), error.globalRanks()};
    service_->arrivals().abandon(ranks, count, peersOf(ranks), known.value_or(lost));
    throw;
  } catch (const std::exception& error) {
    const runtime::Failure other{runtime::FailureKind::kGroup, error.what(), {}};
    service_->arrivals().abandon(ranks, count, peersOf(ranks), known.value_or(other));
    throw;
  }
  return count;
}

void ReshardGroup::refusePipeline(std::vector<int64_t> ranks, const runtime::Failure& failure) {
  sortUnique(ranks);
  if (!areMembers(ranks)) {
    ranks.clear();
  }
  findPresentMembers(global_ranks_);
  if (std::binary_search(ranks.begin(), ranks.end(), globalRank())) {
    waitAtMost(timeout(), service_->arrivals().settleFailed(peersOf(ranks)));
    const uint64_t count = service_->arrivals().arrive(ranks, peersOf(ranks));
    service_->arrivals().abandon(ranks, count, peersOf(ranks), failure);
  } else {
    service_->arrivals().arrive(ranks, peersOf(global_ranks_), failure);
  }
}

void ReshardGroup::close(bool abort) noexcept {
  if (service_ == nullptr) {
    return;
  }
  if (!fork_.isHere()) {
    static_cast<void>(service_.release());  // a forked child: the network's thread lives in the parent
    return;
  }
  const auto drain = abort ? std::chrono::milliseconds(0) : std::min(timeout().count() > 0 ? timeout() : kLongestDrain, kLongestDrain);
  service_->close(drain);
  lines_->close();
}

std::shared_ptr<runtime::ReshardCall> callOf(const c10::intrusive_ptr<::c10d::Work>& work) {
  const auto* reshard = dynamic_cast<ReshardWork*>(work.get());
  return reshard == nullptr ? nullptr : reshard->call();
}

}  // namespace xmesh::c10d_backend
