#pragma once

#include <cstdint>
#include <memory>

#include "runtime/executor.h"
#include "runtime/host/pacer.h"
#include "runtime/host/staging_pool.h"
#include "transport/host_transport.h"

namespace xmesh::runtime {

/// Executors on a HostTransport: they share a bounded staging pool, and the one call in flight is paced. Bytes of different plans never meet there,
/// so that nothing waits for agreement, but what is received into memory of the caller's (Movement::writes_once_agreed).
class HostExecutors final : public Executors {
 public:
  HostExecutors(transport::HostTransport& transport, int64_t staging_bytes) : transport_(transport), staging_(staging_bytes), pacer_(transport) {}

  StartsWhen startsWhen() const override { return StartsWhen::kAtOnce; }
  std::unique_ptr<Executor> make(Execution execution) override;
  void abandon() override { pacer_.abandon(); }
  int64_t peakStagingBytes() const override { return staging_.peakBytes(); }

 private:
  transport::HostTransport& transport_;
  StagingPool staging_;
  Pacer pacer_;
};

}  // namespace xmesh::runtime
