#pragma once

#include <cstdint>
#include <vector>

#include "core/resharding/plan.h"

namespace xmesh::core {

/// The participants of a plan with their hosts and ports, numbered densely, and what a message costs between them. Immutable.
/// A host's NIC is one send port and one receive port (full duplex); inside a host every rank has a send and a receive port of its own.
/// Times are integer ticks (a picosecond, coarser for plans of months), so that sums are exact and ties are ties on every CPU.
class Network {
 public:
  /// Takes a plan that has its tensors and topology. Throws InvalidArgument for a participant that the topology lacks.
  explicit Network(const ReshardingPlan& plan);

  int32_t numRanks() const { return static_cast<int32_t>(ranks_.size()); }
  int32_t numHosts() const { return static_cast<int32_t>(hosts_.size()); }
  /// Ports are numbered 0..numPorts()-1: the hosts' NICs first, then the ranks' local ones. A port has a send and a receive side.
  int32_t numPorts() const { return numHosts() + numRanks(); }
  /// Dense index of a participant's global rank; ascending with it.
  int32_t rankIndex(int64_t global_rank) const;
  int64_t globalRank(int32_t rank) const { return ranks_[static_cast<size_t>(rank)]; }
  /// Dense host index of a dense rank; ascending with the topology's host numbers.
  int32_t hostOf(int32_t rank) const { return host_of_[static_cast<size_t>(rank)]; }
  int32_t hostOfGlobal(int64_t global_rank) const { return hostOf(rankIndex(global_rank)); }
  int64_t hostNumber(int32_t host) const { return hosts_[static_cast<size_t>(host)]; }
  int64_t nicBytesPerS(int32_t host) const { return rates_[static_cast<size_t>(host)]; }

  /// Which ports a message takes and for how many ticks; the last byte is there `flight_ticks` after the longer of both.
  struct Cost {
    int32_t send_port = 0;
    int32_t recv_port = 0;
    int64_t send_ticks = 0;
    int64_t recv_ticks = 0;
    int64_t flight_ticks = 0;
  };
  Cost cost(int32_t src, int32_t dst, int64_t num_bytes) const;
  /// The same between two hosts, for `num_messages` messages of `num_bytes` together.
  Cost nicCost(int32_t src_host, int32_t dst_host, int64_t num_bytes, int64_t num_messages) const;
  double seconds(int64_t ticks) const { return static_cast<double>(ticks) / ticks_per_s_; }

 private:
  std::vector<int64_t> ranks_;
  std::vector<int32_t> dense_;  ///< by global rank, where those are not much sparser than the participants
  std::vector<int32_t> host_of_;
  std::vector<int64_t> hosts_;
  std::vector<int64_t> rates_;
  std::vector<double> ticks_per_byte_;  ///< by host
  double ticks_per_s_ = 1e12;
  double local_ticks_per_byte_ = 0;
  int64_t message_ticks_ = 0;
  int64_t latency_ticks_ = 0;
  int64_t local_latency_ticks_ = 0;
};

/// Messages under construction: each is placed at the earliest time at which its data and both ports are free, ports being served in the order
/// of the calls. finish() appends them to the plan ordered by start time, which respects every dependency.
class Timeline {
 public:
  Timeline(ReshardingPlan& plan, const Network& network);
  /// Adds a message whose data the sender has from `ready_ticks` on; returns when the receiver has it.
  int64_t add(const Message& message, int64_t ready_ticks);
  void finish();
  void reserve(size_t num_messages);

 private:
  ReshardingPlan& plan_;
  const Network& network_;
  std::vector<int64_t> send_free_;
  std::vector<int64_t> recv_free_;
  std::vector<int64_t> starts_;
  std::vector<Message> messages_;
};

}  // namespace xmesh::core
