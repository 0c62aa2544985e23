#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "c10d/call_details.h"
#include "c10d/movement.h"
#include "c10d/stream/device_lines.h"
#include "core/resharding/plan.h"
#include "runtime/agreement/rank_numbers.h"
#include "runtime/calls/reshard_service.h"
#include "runtime/fork_mark.h"

namespace xmesh::c10d_backend {

/// How the tensors of a rank move; but for the last three the same on every rank.
struct EndpointOptions {
  int64_t staging_bytes = int64_t{64} << 20;  ///< most staging memory per rank, all calls in flight together
  bool is_paced = true;                       ///< pace direct sends on topologies whose rates were measured
  bool shared_memory = true;                  ///< between ranks at one address
  std::string token = {};                     ///< the secret of those who may connect; its first 16 bytes count
  std::string listen_host = "127.0.0.1";
  /// Who hears what the network tells, instead of the service, and passes on what is the service's; it outlives the endpoint. Empty: nobody.
  std::function<transport::PeerEvents&(transport::PeerEvents& service)> listener = {};
};

/// One rank's end of what moves tensors between ranks: the network, the service that runs calls on it, and the ways of tensors into calls. It does
/// not know how ranks find each other: who makes it says where they are, before the first call with them. Threading: as ReshardService; prepare(),
/// terms() and close() on any thread at any time. No method needs the GIL.
class Endpoint {
 public:
  /// Listens when this returns.
  Endpoint(runtime::RankNumbers numbers, int32_t own_peer, std::chrono::milliseconds timeout, EndpointOptions options,
           std::shared_ptr<DeviceLines> lines);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  int64_t globalRank() const { return numbers_.globalRank(own_peer_); }
  const runtime::RankNumbers& numbers() const { return numbers_; }
  runtime::ReshardService& service() { return *service_; }
  Movements& movements() { return movements_; }
  /// Of calls that begin from now on.
  void setTimeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  std::chrono::milliseconds timeout() const { return timeout_.load(); }

  /// Compiles what this rank does for a plan. Keep it: later calls with the same arguments start from it.
  std::shared_ptr<const runtime::PreparedPlan> prepare(std::shared_ptr<const core::ReshardingPlan> plan, const CallDetails& details) const;
  runtime::Participants participantsOf(std::vector<int64_t> ranks) const;
  /// The terms of meetings and watches of `ranks` (ascending global ranks; this one among them), who compare `fields`.
  std::shared_ptr<const runtime::CallTerms> terms(std::vector<int64_t> ranks, const runtime::CallFields& fields, std::string summary) const;
  /// Ends all calls, waiting at most the timeout for those whose callers do not wait; `abort`: at once. Idempotent; does nothing in a forked child.
  void close(bool abort) noexcept;

 private:
  const runtime::RankNumbers numbers_;
  const int32_t own_peer_;
  std::atomic<std::chrono::milliseconds> timeout_;
  const EndpointOptions options_;
  const runtime::ForkMark fork_;
  const std::shared_ptr<DeviceLines> lines_;  ///< before the service, which uses them
  Movements movements_;
  std::unique_ptr<runtime::ReshardService> service_;
};

}  // namespace xmesh::c10d_backend
