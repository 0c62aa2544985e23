#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "runtime/reshard_case.h"
#include "runtime/stream/stream_executor.h"
#include "transport/fakes/fake_stream_network.h"

namespace xmesh::replay {

/// What the largest sum and the largest message need, whatever the bound.
inline int64_t leastStagingBytes(const runtime::Program& program) {
  int64_t sum = 0;
  int64_t message = 0;
  for (const runtime::ReduceStep& step : program.reductions) {
    sum = std::max(sum, runtime::stagedBytes((step.end - step.begin) * step.reduction.accumulatorItemBytes()));
  }
  for (const runtime::SendStep& step : program.sends) {
    message = std::max(message, runtime::stagedBytes(program.numBytes(step)));
  }
  for (const runtime::ReceiveStep& step : program.receives) {
    message = std::max(message, runtime::stagedBytes(program.numBytes(step)));
  }
  return sum + message;
}

/// Runs a plan on the fake stream network; returns the first difference from the oracle, or an empty text.
inline std::string runOnStreams(const core::ReshardingPlan& plan, MemoryLayout layout, uint64_t seed, int64_t staging_bytes,
                                runtime::ProgramOptions options = {}, const runtime::StreamKernels& kernels = runtime::HostKernels()) {
  const int64_t num_ranks = plan.topology.hostOfRanks().rbegin()->first + 1;
  transport::FakeStreamNetwork network(static_cast<int32_t>(num_ranks), seed);
  ReshardCase data(plan, num_ranks, layout, seed);
  std::vector<std::shared_ptr<const runtime::Program>> programs;
  std::vector<std::unique_ptr<runtime::StreamExecutor>> executors;
  std::vector<std::vector<std::max_align_t>> staging;
  std::vector<std::unique_ptr<transport::StreamTransport>> owned;
  options.groups = options.groups.value_or(runtime::GroupLimits{staging_bytes});
  for (int64_t rank : plan.participants()) {
    auto program = runtime::compileProgram(plan, rank, options);
    programs.push_back(program);
    std::vector<int32_t> peers = sameRanks(*program);
    std::vector<transport::StreamTransport*> circles;
    for (const std::vector<int64_t>& ranks : program->circles) {
      const bool is_in_it = std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
      circles.push_back(is_in_it ? owned.emplace_back(network.circle(static_cast<int32_t>(rank), ranks)).get() : nullptr);
    }
    executors.push_back(std::make_unique<runtime::StreamExecutor>(std::move(program), network.transport(static_cast<int32_t>(rank)), std::move(peers),
                                                                  data.src(rank), data.dst(rank), kernels, std::move(circles)));
    EXPECT_LE(executors.back()->stagingBytes(), std::max(options.groups->bytes, leastStagingBytes(*programs.back()))) << "rank " << rank;
    staging.emplace_back((static_cast<size_t>(executors.back()->stagingBytes()) + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
    executors.back()->enqueue(staging.back().data());
  }
  network.run();
  return data.firstDifference();
}

}  // namespace xmesh::replay
