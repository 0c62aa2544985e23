#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/host/host_executors.h"
#include "runtime/reshard_service.h"
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

}  // namespace xmesh::runtime
