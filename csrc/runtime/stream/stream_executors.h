#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "runtime/agreement/participants.h"
#include "runtime/executor.h"
#include "runtime/stream/call_order.h"
#include "runtime/stream/stream_kernels.h"
#include "transport/stream_transport.h"

namespace xmesh::runtime {

/// The communicators of one group on a line: each set of ranks has one of its own, all on the line's one in-order stream.
class Communicators {
 public:
  virtual ~Communicators() = default;
  struct Proposal {
    uint64_t generation = 0;
    std::shared_ptr<void> hold;  ///< as long as it is kept, that communicator is not given up for lack of room
  };
  /// How many-th communicator of a call's participants this rank would take: one more than that of the last one where that is gone. The ranks agree
  /// on the most that one of them says, so that none waits on one that another has given up. Any thread.
  virtual Proposal propose(const Participants& participants) = 0;
  /// That one, in which a peer is its index among the participants; made, which may wait for the others, where it is not there. Throws what that
  /// fails with, and where the communicator was given up or is aborted meanwhile. The line's thread.
  virtual std::shared_ptr<transport::StreamTransport> of(const Participants& participants, uint64_t generation) = 0;
  /// Aborts that one of these participants, also while it is made, or before. Any thread.
  virtual void abort(const Participants& participants, uint64_t generation, const transport::StreamFailure& failure) noexcept = 0;
};

/// Executors of one group's rank on a device's line, on StreamTransports. Calls are enqueued in the line's CallOrder, which all groups share that use
/// it.
///
/// What is enqueued cannot be taken back. A call that fails then aborts its communicator, and with it all that is enqueued there: else its memory
/// would stay for as long as the others do not come.
///
/// Threading: the network's thread, and the line's, on which everything that may block for a peer or the device happens: communicators are made there
/// and programs enqueued. Where other groups use the line, calls are launched on their networks' threads too.
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
  /// Where calls are enqueued.
  struct Line {
    std::shared_ptr<Communicators> communicators;
    std::shared_ptr<const StreamKernels> kernels;
    std::shared_ptr<CallOrder> order;
    uint64_t group = 0;  ///< the group's name in that order, alike on all of its ranks
  };

  StreamExecutors(Line line, Allocate allocate, Threads threads);
  ~StreamExecutors() override;

  StartsWhen startsWhen() const override { return StartsWhen::kInTurn; }
  bool knowsProgress() const override { return false; }
  void promise(uint64_t turn) override;
  void disconnect() override;
  std::unique_ptr<Executor> make(Execution execution) override;
  void abandon() override {}
  int64_t peakStagingBytes() const override;

  struct Call;
  struct Shared;

 private:
  const std::shared_ptr<Shared> shared_;
};

}  // namespace xmesh::runtime
