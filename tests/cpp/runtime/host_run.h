#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/host/host_executor.h"
#include "runtime/reshard_case.h"
#include "transport/fakes/fake_host_network.h"

namespace xmesh::replay {

/// N ranks on the fake host network, each with a staging pool.
class HostRanks {
 public:
  HostRanks(int64_t num_ranks, uint64_t seed, int64_t staging_bytes) : network_(static_cast<int32_t>(num_ranks), seed) {
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      endpoints_.push_back(network_.join(static_cast<int32_t>(rank), events_));
      for (int64_t peer = 0; peer < num_ranks; ++peer) {
        if (peer != rank) {
          endpoints_.back()->setAddress(static_cast<int32_t>(peer), "fake:" + std::to_string(peer));
        }
      }
      pools_.push_back(std::make_unique<runtime::StagingPool>(staging_bytes));
    }
  }

  transport::FakeHostNetwork& network() { return network_; }
  transport::PeerNetwork& endpoint(int64_t rank) { return *endpoints_.at(static_cast<size_t>(rank)); }
  runtime::StagingPool& pool(int64_t rank) { return *pools_.at(static_cast<size_t>(rank)); }

 private:
  class NoEvents final : public transport::PeerEvents {
   public:
    void onControl(int32_t /*peer*/, std::string /*message*/) override {}
    void onPeerLost(int32_t /*peer*/, const std::string& /*reason*/, bool /*is_goodbye*/) override {}
  };
  NoEvents events_;
  transport::FakeHostNetwork network_;
  std::vector<std::unique_ptr<runtime::StagingPool>> pools_;
  std::vector<std::unique_ptr<transport::PeerNetwork>> endpoints_;
};

/// One operation on all ranks.
class HostOperation {
 public:
  HostOperation(HostRanks& ranks, const core::ReshardingPlan& plan, uint64_t call, MemoryLayout layout, uint64_t seed,
                runtime::ProgramOptions options = {})
      : ranks_(ranks), data_(plan, plan.topology.hostOfRanks().rbegin()->first + 1, layout, seed) {
    for (int64_t rank : plan.participants()) {
      auto program = runtime::compileProgram(plan, rank, options);
      std::vector<int32_t> peers = sameRanks(*program);
      executors_.push_back(std::make_unique<runtime::HostExecutor>(std::move(program), ranks.endpoint(rank), call, std::move(peers), data_.src(rank),
                                                                   data_.dst(rank), ranks.pool(rank), [this] { ++num_done_; }));
      rank_of_.push_back(rank);
    }
  }

  /// Each rank starts on its own thread, as far as the fake has threads.
  void start() {
    for (size_t i = 0; i < executors_.size(); ++i) {
      startOne(i);
    }
  }
  void startOne(size_t i, bool may_write = true) {
    ranks_.endpoint(rank_of_[i]).post([this, i, may_write] { executors_[i]->start(may_write); });
  }
  void allowWrites(size_t i) {
    ranks_.endpoint(rank_of_[i]).post([this, i] { executors_[i]->allowWrites(); });
  }
  bool isUntouched(size_t i) const { return data_.isUntouched(rank_of_[i]); }
  size_t numRanks() const { return executors_.size(); }
  bool isDone() const { return num_done_ == executors_.size(); }
  runtime::HostExecutor& executor(size_t i) { return *executors_[i]; }
  std::string firstDifference() { return data_.firstDifference(); }
  std::string progress() const {
    std::string out;
    for (size_t i = 0; i < executors_.size(); ++i) {
      out += "rank " + std::to_string(rank_of_[i]) + " " + runtime::describeProgress(executors_[i]->progress()) + "\n";
    }
    return out;
  }

 private:
  HostRanks& ranks_;
  ReshardCase data_;
  std::vector<int64_t> rank_of_;
  std::vector<std::unique_ptr<runtime::HostExecutor>> executors_;
  size_t num_done_ = 0;
};

}  // namespace xmesh::replay
