#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "runtime/agreement/participants.h"
#include "runtime/executor.h"
#include "runtime/stream/stream_kernels.h"
#include "transport/stream_transport.h"

namespace xmesh::runtime {

/// The communicators of one line: each set of ranks has one of its own, all on the line's one in-order stream.
class Communicators {
 public:
  virtual ~Communicators() = default;
  /// That of a call's participants, in which a peer is its index among them. Where there is none, or it was aborted, it is made, which may wait for
  /// the others. Throws what that fails with. The line's thread.
  virtual std::shared_ptr<transport::StreamTransport> of(const Participants& participants) = 0;
  /// Aborts that communicator, also while it is being made. No-op where there is none. Any thread.
  virtual void abort(const Participants& participants, const transport::StreamFailure& failure) noexcept = 0;
};

/// Executors of one line, on StreamTransports. What they enqueue meets its counterpart by order alone. So nothing is enqueued before the ranks have
/// agreed on a call, and calls are enqueued in the order in which they were made; ranks that make calls in different orders use different lines.
///
/// What is enqueued cannot be taken back. A call that fails then aborts its communicator, and with it all that is enqueued there: else its memory
/// would stay for as long as the others do not come.
///
/// Threading: the network's thread, and the line's, on which everything that may block for a peer or the device happens: communicators are made there
/// and programs enqueued.
class StreamExecutors final : public Executors {
 public:
  /// Memory that the stream may use, freed with the last reference. The line's thread.
  using Allocate = std::function<std::shared_ptr<void>(int64_t num_bytes)>;
  /// Runs a task on some thread, tasks in order. Any thread.
  using Post = std::function<void(std::function<void()> task)>;
  struct Threads {
    Post network;
    Post line;
  };

  /// `communicators` and `kernels` outlive what is enqueued. `staging_bytes` bounds the memory of one call.
  StreamExecutors(std::shared_ptr<Communicators> communicators, const StreamKernels& kernels, Allocate allocate, Threads threads,
                  int64_t staging_bytes);
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
