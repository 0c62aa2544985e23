#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace xmesh::runtime {

/// How far an operation is with one peer.
struct PeerProgress {
  int64_t global_rank = 0;
  int64_t num_sent = 0;
  int64_t num_sends = 0;
  int64_t num_received = 0;
  int64_t num_receives = 0;
};

/// Global ranks with messages to or from them that are not complete, in the order given.
std::vector<int64_t> waitingFor(const std::vector<PeerProgress>& peers);

/// For error texts: "received 3 of 8 messages from rank 5, sent 0 of 2 messages to rank 7"; empty when nothing is missing.
std::string describeProgress(const std::vector<PeerProgress>& peers);

}  // namespace xmesh::runtime
