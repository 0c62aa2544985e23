#include "runtime/calls/peer_progress.h"

namespace xmesh::runtime {

std::vector<int64_t> waitingFor(const std::vector<PeerProgress>& peers) {
  std::vector<int64_t> out;
  for (const PeerProgress& peer : peers) {
    if (peer.num_sent < peer.num_sends || peer.num_received < peer.num_receives) {
      out.push_back(peer.global_rank);
    }
  }
  return out;
}

std::string describeProgress(const std::vector<PeerProgress>& peers) {
  std::string out;
  const auto add = [&out](const char* verb, int64_t count, int64_t total, const char* preposition, int64_t global_rank) {
    if (count < total) {
      out += std::string(out.empty() ? "" : ", ") + verb + std::to_string(count) + " of " + std::to_string(total) + " messages " + preposition +
             " rank " + std::to_string(global_rank);
    }
  };
  for (const PeerProgress& peer : peers) {
    add("received ", peer.num_received, peer.num_receives, "from", peer.global_rank);
    add("sent ", peer.num_sent, peer.num_sends, "to", peer.global_rank);
  }
  return out;
}

}  // namespace xmesh::runtime
