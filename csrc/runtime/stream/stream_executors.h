#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>

#include "runtime/executor.h"
#include "runtime/stream/stream_executor.h"
#include "runtime/stream/stream_kernels.h"
#include "transport/stream_transport.h"

namespace xmesh::runtime {

/// Executors on a StreamTransport. What they enqueue meets its counterpart by order alone. So nothing is enqueued before the ranks have agreed on a
/// call, and calls are enqueued in the order in which they were made; ranks that make calls in different orders must use different communicators.
///
/// What is enqueued cannot be taken back: after cancel() tensors and staging memory stay until the stream has passed them.
class StreamExecutors final : public Executors {
 public:
  /// Memory that the stream may use, freed with the last reference.
  using Allocate = std::function<std::shared_ptr<void>(int64_t num_bytes)>;
  /// Runs a task on the network's thread. Any thread.
  using Post = std::function<void(std::function<void()> task)>;

  /// `transport` and `kernels` outlive this object, and what it has enqueued. `staging_bytes` bounds the memory of one call.
  StreamExecutors(transport::StreamTransport& transport, const StreamKernels& kernels, Allocate allocate, Post post, int64_t staging_bytes);
  ~StreamExecutors() override;

  bool needsAgreement() const override { return true; }
  std::unique_ptr<Executor> make(Execution execution) override;
  void abandon() override;
  int64_t peakStagingBytes() const override;

  struct Call;
  struct Shared;

 private:
  const std::shared_ptr<Shared> shared_;
};

}  // namespace xmesh::runtime
