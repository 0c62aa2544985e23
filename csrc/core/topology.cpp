#include "core/topology.h"

#include <utility>

#include "core/error.h"

namespace xmesh::core {

Topology::Topology(std::map<int64_t, int64_t> host_of, LinkModel links, std::map<int64_t, int64_t> nic_of_host)
    : host_of_(std::move(host_of)), links_(links), nic_of_host_(std::move(nic_of_host)) {
  for (const auto& [rank, host] : host_of_) {
    require(rank >= 0 && host >= 0,
            "a topology maps ranks to hosts, neither negative; got rank " + std::to_string(rank) + " on host " + std::to_string(host));
  }
  require(links_.nic_bytes_per_s > 0 && links_.local_bytes_per_s > 0, "a link's rate must be positive (bytes per second)");
  require(links_.latency_us >= 0 && links_.message_us >= 0 && links_.local_latency_us >= 0, "a link's times cannot be negative (microseconds)");
  for (const auto& [host, rate] : nic_of_host_) {
    require(rate > 0, "the NIC rate of host " + std::to_string(host) + " must be positive (bytes per second), got " + std::to_string(rate));
  }
}

Topology Topology::uniform(int64_t num_ranks, int64_t devices_per_host, LinkModel links) {
  require(devices_per_host > 0, "devices_per_host must be positive, got " + std::to_string(devices_per_host));
  std::map<int64_t, int64_t> host_of;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    host_of[rank] = rank / devices_per_host;
  }
  return Topology(std::move(host_of), links);
}

int64_t Topology::hostOf(int64_t global_rank) const {
  const auto found = host_of_.find(global_rank);
  require(found != host_of_.end(), "rank " + std::to_string(global_rank) + " has no host in the topology");
  return found->second;
}

int64_t Topology::nicBytesPerS(int64_t host) const {
  const auto found = nic_of_host_.find(host);
  return found == nic_of_host_.end() ? links_.nic_bytes_per_s : found->second;
}

}  // namespace xmesh::core
