#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "transport/peer_network.h"

namespace xmesh::transport {

class FakeHostWorld;

/// N endpoints in one process and one thread. A seeded scheduler picks what happens next among all that can: a posted task, the arrival of a control
/// message, a piece of a message leaving or arriving, a notice of loss. Orders that the contract of PeerNetwork does not promise vary with the
/// seed; data may overtake control and the reverse. Time is virtual: timers fire only when told so. For tests.
class FakeHostNetwork {
 public:
  FakeHostNetwork(int32_t num_ranks, uint64_t seed);
  ~FakeHostNetwork();
  FakeHostNetwork(const FakeHostNetwork&) = delete;
  FakeHostNetwork& operator=(const FakeHostNetwork&) = delete;

  /// The endpoint of `rank`; once per rank. `events` must outlive it. It may be used from outside while nothing runs: the whole process counts as its
  /// thread. Destroying it is an orderly goodbye to the ranks that it was in contact with. It must not outlive this object.
  std::unique_ptr<PeerNetwork> join(int32_t rank, PeerEvents& events);

  /// Lets one thing happen; false when nothing can without the clock moving.
  bool step();
  /// Lets everything happen that can without the clock moving. Throws std::runtime_error after `max_steps`.
  void runUntilIdle(int64_t max_steps = 100'000'000);
  /// Until done() holds. When idle, the clock moves on to the next timer; false when there is none left.
  bool runUntil(const std::function<bool()>& done, int64_t max_steps = 100'000'000);
  /// Moves the clock by `delay`; timers that fall due fire in their order, and everything happens that they lead to.
  void advance(std::chrono::milliseconds delay);

  /// The rank's process dies: its endpoint does and says nothing any more, the ranks in contact with it are told that it is lost, others when
  /// they first try to reach it. Its PeerNetwork object stays valid and silent.
  void kill(int32_t rank);
  /// The rank's process is stopped (SIGSTOP) and goes on later (SIGCONT): meanwhile nothing runs on it, and nobody is told.
  void stop(int32_t rank);
  void resume(int32_t rank);

 private:
  std::shared_ptr<FakeHostWorld> world_;
};

}  // namespace xmesh::transport
