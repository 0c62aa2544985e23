#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/resharding/fingerprint.h"
#include "runtime/calls/reshard_service.h"
#include "runtime/host/host_executors.h"
#include "transport/fakes/fake_host_network.h"

namespace xmesh::runtime {

/// A service of one rank on the fake network, which carries its control messages and its tensors.
inline std::unique_ptr<ReshardService> hostService(transport::FakeHostNetwork& network, std::vector<int64_t> ranks, int32_t rank) {
  return std::make_unique<ReshardService>(ReshardService::Options{std::move(ranks), rank}, [&network, rank](transport::PeerEvents& events) {
    std::unique_ptr<transport::PeerNetwork> joined = network.join(rank, events);
    auto executors = std::make_unique<ExecutorsByRoute>(std::make_unique<HostExecutors>(*joined, int64_t{1} << 20));
    return ReshardService::Networks{std::move(joined), std::move(executors), "fake"};
  });
}

/// What c10d makes, without torch: group ranks are global ranks.
inline Participants participantsOf(std::vector<int64_t> ranks, int64_t me) {
  Participants out;
  out.peers.assign(ranks.begin(), ranks.end());
  out.hash = hashRanks(ranks);
  out.my_index = std::find(ranks.begin(), ranks.end(), me) - ranks.begin();
  out.ranks = std::move(ranks);
  return out;
}

inline std::shared_ptr<PreparedPlan> preparedFor(const core::ReshardingPlan& plan, int64_t rank, const ProgramOptions& options = {}) {
  auto out = std::make_shared<PreparedPlan>();
  out->terms.participants = participantsOf(plan.participants(), rank);
  out->terms.fingerprint = core::planFingerprint(plan);
  out->program = compileProgram(plan, rank, options);
  out->program_peers.assign(out->program->peers().begin(), out->program->peers().end());
  out->plan = std::make_shared<core::ReshardingPlan>(plan);
  return out;
}

/// A rank's service knows where the others are.
inline void introduce(ReshardService& service, int32_t rank, int32_t num_ranks) {
  for (int32_t peer = 0; peer < num_ranks; ++peer) {
    if (peer != rank) {
      service.network().setAddress(peer, "fake");
    }
  }
}

/// A rank's part of a tensor of one dim, in `memory`, which is filled with -1; nothing where it has none.
inline LocalTensor localIn(std::vector<int32_t>& memory, const std::optional<std::vector<int64_t>>& shape) {
  if (!shape.has_value()) {
    return {};
  }
  memory.assign(static_cast<size_t>(shape->front()), -1);
  return {memory.data(), *shape, {1}};
}

}  // namespace xmesh::runtime
