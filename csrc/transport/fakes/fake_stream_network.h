#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "transport/stream_transport.h"

namespace xmesh::transport {

/// No stream can go on, and not all are empty. The message names every waiting rank and what it waits for.
class StreamDeadlock : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class FakeStream;

/// N ranks in one process whose communicators move bytes as NCCL's do: in order per communicator, with rendezvous and without any buffering, groups
/// in passes and batches, and ways that are connected at a group's begin (see StreamTransport).
/// Every (rank, communicator) has a stream of its own. Nothing happens before run(). One thread. For tests.
class FakeStreamNetwork {
 public:
  /// `seed` chooses the order in which streams that can go on do so, and the order of NCCL's rounds.
  explicit FakeStreamNetwork(int32_t num_ranks, uint64_t seed = 0);
  ~FakeStreamNetwork();
  FakeStreamNetwork(const FakeStreamNetwork&) = delete;
  FakeStreamNetwork& operator=(const FakeStreamNetwork&) = delete;

  /// The end of `communicator` at `rank`; lives as long as this object.
  StreamTransport& transport(int32_t rank, int32_t communicator = 0);
  /// The end at `rank` of a communicator of `members` (ascending) that only broadcasts, on the rank's stream of communicator 0; an index is its rank.
  std::unique_ptr<StreamTransport> circle(int32_t rank, std::vector<int64_t> members);
  /// Runs everything that is enqueued, also what launches enqueue meanwhile. Throws StreamDeadlock when the streams block each other,
  /// std::runtime_error when the sizes of a matched send and recv differ (naming both ends), std::logic_error when a group is left open.
  void run();
  /// Moves one message or ends one entry; false when nothing can.
  bool step();
  /// Whether nothing is enqueued on a rank's stream that it has not passed.
  bool isEmpty(int32_t rank, int32_t communicator = 0) const;

 private:
  bool tryConnect();
  std::string describeDeadlock() const;

  int32_t num_ranks_;
  std::mt19937_64 random_;
  std::vector<int64_t> round_of_;                                               ///< by how far the receiver is behind the sender
  std::map<std::pair<int32_t, int32_t>, std::unique_ptr<FakeStream>> streams_;  ///< by (communicator, rank)
};

}  // namespace xmesh::transport
