#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/host_run.h"
#include "runtime/manual_transport.h"

namespace xmesh::replay {

/// One rank's executor on a ManualTransport.
struct OneRank {
  OneRank(const core::ReshardingPlan& plan, int64_t rank, std::vector<runtime::LocalTensor> src, std::vector<runtime::LocalTensor> dst,
          int64_t staging_bytes = 1 << 20)
      : pool(staging_bytes) {
    auto program = runtime::compileProgram(plan, rank);
    std::vector<int32_t> peers = sameRanks(*program);
    executor = std::make_unique<runtime::HostExecutor>(std::move(program), transport, 1, std::move(peers), std::move(src), std::move(dst), pool,
                                                       [this] { ++num_done; });
  }
  ManualTransport transport;
  runtime::StagingPool pool;
  int num_done = 0;
  std::unique_ptr<runtime::HostExecutor> executor;
};

}  // namespace xmesh::replay
