#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace xmesh::core {

/// What a byte and a message cost. Rates are bytes per second each way (full duplex), times are microseconds.
struct LinkModel {
  int64_t nic_bytes_per_s = 12'500'000'000;     ///< a host's NIC unless Topology names another rate for it
  int64_t local_bytes_per_s = 200'000'000'000;  ///< between two devices of one host
  double latency_us = 20.0;                     ///< one way, first byte
  double message_us = 10.0;                     ///< cost of one more message on a NIC
  double local_latency_us = 5.0;
  bool is_measured = false;  ///< true when calibration wrote the numbers; only then are sends paced
  bool operator==(const LinkModel&) const = default;
};

/// Which host a rank lives on and what the links carry. Immutable value.
class Topology {
 public:
  Topology() = default;
  /// `host_of` maps every global rank in use to a host index; `nic_of_host` overrides the model's NIC rate for single hosts.
  /// Throws InvalidArgument for a negative rank or host, or a rate that is not positive.
  Topology(std::map<int64_t, int64_t> host_of, LinkModel links, std::map<int64_t, int64_t> nic_of_host = {});
  /// Ranks 0..num_ranks-1, `devices_per_host` consecutive ranks to a host.
  static Topology uniform(int64_t num_ranks, int64_t devices_per_host, LinkModel links = {});

  /// Throws InvalidArgument naming the rank when it is not in the topology.
  int64_t hostOf(int64_t global_rank) const;
  bool hasRank(int64_t global_rank) const { return host_of_.contains(global_rank); }
  int64_t nicBytesPerS(int64_t host) const;
  const LinkModel& links() const { return links_; }
  const std::map<int64_t, int64_t>& hostOfRanks() const { return host_of_; }
  const std::map<int64_t, int64_t>& nicOfHosts() const { return nic_of_host_; }
  bool operator==(const Topology&) const = default;

 private:
  std::map<int64_t, int64_t> host_of_;
  LinkModel links_;
  std::map<int64_t, int64_t> nic_of_host_;
};

}  // namespace xmesh::core
