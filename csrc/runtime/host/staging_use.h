#pragma once

#include <cstdint>
#include <utility>

#include "runtime/host/staging_pool.h"

namespace xmesh::runtime {

/// What one client does with a pool. It remembers whether memory was given back, for others to be served at the end of an event.
class StagingUse {
 public:
  StagingUse(StagingPool& pool, StagingClient& client) : pool_(pool), client_(client) {}

  /// See StagingPool::acquire.
  StagingBuffer acquire(StagingKind kind, int64_t num_bytes) { return pool_.acquire(kind, num_bytes, client_); }
  void withdraw(StagingKind kind) { pool_.withdraw(kind, client_); }
  /// Gives a buffer back, if it is one, and empties it.
  void release(StagingBuffer& buffer) {
    if (buffer) {
      pool_.release(std::exchange(buffer, {}), client_);
      has_released_ = true;
    }
  }
  /// Others have to be served at the next serve(), whatever was given back.
  void wakeOthers() { has_released_ = true; }
  /// Serves others if something was given back since the last time.
  void serve() {
    if (std::exchange(has_released_, false)) {
      pool_.serve();
    }
  }
  /// The end: the client holds nothing any more.
  void forget() { pool_.forget(client_); }
  StagingPool& pool() { return pool_; }

 private:
  StagingPool& pool_;
  StagingClient& client_;
  bool has_released_ = false;
};

}  // namespace xmesh::runtime
