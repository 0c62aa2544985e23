#include "c10d/endpoint.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/resharding/fingerprint.h"
#include "core/resharding/strategy.h"
#include "runtime/host/host_executors.h"
#include "runtime/host/mirrored_executors.h"
#include "runtime/host/pacer.h"
#include "transport/tcp/network.h"

namespace xmesh::c10d_backend {
namespace {

constexpr std::chrono::milliseconds kConnectTimeout{30'000};
constexpr std::chrono::milliseconds kLongestDrain{30'000};
constexpr int64_t kMessagesPerStaging = 16;  ///< a message is at most this part of the staging bound

/// TCP, told whom to bind to and whom to admit, for control and for cpu tensors; made inside the service, which it reports to.
runtime::ReshardService::MakeNetworks networksMaker(int32_t own_peer, const EndpointOptions& endpoint, std::shared_ptr<DeviceLines> lines) {
  return [=](transport::PeerEvents& events) {
    transport::TcpNetworkOptions options;
    options.own_peer = own_peer;
    options.listen_host = endpoint.listen_host;
    std::copy_n(endpoint.token.begin(), std::min(endpoint.token.size(), options.token.size()), options.token.begin());
    options.shared_memory = endpoint.shared_memory;
    options.connect_timeout = kConnectTimeout;
    auto network = std::make_unique<transport::TcpNetwork>(options, endpoint.listener ? endpoint.listener(events) : events);
    std::string address = network->address();
    auto on_host = std::make_unique<runtime::HostExecutors>(*network, endpoint.staging_bytes);
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

Endpoint::Endpoint(runtime::RankNumbers numbers, int32_t own_peer, std::chrono::milliseconds timeout, EndpointOptions options,
                   std::shared_ptr<DeviceLines> lines)
    : numbers_(std::move(numbers)),
      own_peer_(own_peer),
      timeout_(timeout),
      options_(std::move(options)),
      lines_(std::move(lines)),
      movements_(lines_) {
  core::require(options_.staging_bytes >= 4096, "staging_bytes must be at least 4096, got " + std::to_string(options_.staging_bytes));
  service_ =
      std::make_unique<runtime::ReshardService>(runtime::ReshardService::Options{numbers_, own_peer_}, networksMaker(own_peer_, options_, lines_));
}

Endpoint::~Endpoint() { close(false); }

std::shared_ptr<const runtime::PreparedPlan> Endpoint::prepare(std::shared_ptr<const core::ReshardingPlan> plan, const CallDetails& details) const {
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
  out->program_peers = numbers_.peersOf(out->program->peers());
  for (const std::vector<int64_t>& circle : out->program->circles) {
    const bool is_in_it = std::binary_search(circle.begin(), circle.end(), globalRank());
    out->circles.push_back(is_in_it ? std::optional(participantsOf(circle)) : std::nullopt);
  }
  if (options_.is_paced) {
    for (const auto& [rank, bytes_per_s] : runtime::pacingRates(*plan, globalRank())) {
      out->pacing.emplace_back(numbers_.peerOf(rank), bytes_per_s);
    }
  }
  out->terms.fields = runtime::packFields(fieldsOf(*plan, details, agreed_staging_bytes));
  out->terms.fingerprint = core::planFingerprint(*plan) + std::to_string(runtime::hashBytes(out->terms.fields));
  out->terms.summary = summaryOf(*plan, details);
  out->plan = std::move(plan);
  return out;
}

runtime::Participants Endpoint::participantsOf(std::vector<int64_t> ranks) const {
  runtime::Participants out;
  const auto me = std::find(ranks.begin(), ranks.end(), globalRank());
  core::require(me != ranks.end(), "rank " + std::to_string(globalRank()) + " is not one of ranks " + runtime::rankList(ranks));
  out.my_index = me - ranks.begin();
  out.peers = numbers_.peersOf(ranks);
  out.hash = runtime::hashRanks(ranks);
  out.ranks = std::move(ranks);
  return out;
}

std::shared_ptr<const runtime::CallTerms> Endpoint::terms(std::vector<int64_t> ranks, const runtime::CallFields& fields, std::string summary) const {
  auto out = std::make_shared<runtime::CallTerms>();
  out->participants = participantsOf(std::move(ranks));
  out->fields = runtime::packFields(fields);
  out->fingerprint = std::to_string(runtime::hashBytes(out->fields));
  out->summary = std::move(summary);
  return out;
}

void Endpoint::close(bool abort) noexcept {
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

}  // namespace xmesh::c10d_backend
