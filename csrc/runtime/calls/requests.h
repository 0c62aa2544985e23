#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "runtime/agreement/messages.h"
#include "runtime/agreement/participants.h"
#include "runtime/executor.h"

namespace xmesh::runtime {

/// A reshard: its participants compare what they call, and are numbered by their calls.
struct ReshardRequest {
  Movement movement;
  std::chrono::milliseconds timeout{0};  ///< 0: none
  uint64_t lane = 0;                     ///< 0, or backwardLane() of the forward call
  bool is_detached = false;              ///< its caller waits for its own messages at most; close() waits for the end
};

/// A reshard of a pipeline: its participants know already that they make the same call, and do not compare.
struct TransferRequest {
  Movement movement;
  CallKey key;                            ///< the same on every participant, never used twice
  CallKey watch;                          ///< the watch that it fails with, and that fails with it
  uint64_t phase = 0;                     ///< the watch's phase; never less than that of a transfer before it
  std::function<std::string()> describe;  ///< what it carries: for error texts, on the network's thread
};

/// The ranks compare terms, and move nothing.
struct MeetingRequest {
  std::shared_ptr<const CallTerms> terms;
  CallKey key;
  std::optional<CallKey> watch;
  std::chrono::milliseconds timeout{0};
};

/// A watch: see ReshardService.
struct WatchRequest {
  std::shared_ptr<const CallTerms> terms;
  CallKey key;
  std::chrono::milliseconds timeout{0};   ///< said in the text of a failure after ReshardService::suspect()
  uint64_t pipeline = 0;                  ///< how many-th pipeline of its participants it is of, as Arrivals::arrive() said; 0: of none
  std::function<std::string()> describe;  ///< what this rank does now: for error texts, on the network's thread
};

}  // namespace xmesh::runtime
