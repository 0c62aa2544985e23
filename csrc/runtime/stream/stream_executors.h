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

/// Executors of one line, on StreamTransports. What they enqueue meets its counterpart by order alone. So nothing is enqueued before the ranks have
/// agreed on a call, and all enqueue their common calls in one order, however each of them made them: as backwards do, whose order is autograd's.
///
/// That order is the turns', by D. Skeen's total order (in K. Birman and T. Joseph, Reliable Communication in the Presence of Failures, ACM TOCS
/// 5(1), 1987, section 5.2). A rank proposes one more than every turn that it has proposed or heard to be agreed; the most that a participant
/// proposes is agreed; equal turns go by the call's name. A call is enqueued once nothing with an earlier turn, proposed or agreed, is left here:
/// what comes later gets a later one. So that no call waits for one that a rank makes only later, perhaps when the first has ended, this rank then
/// asks the others to put that one behind (Execution::on_held); who has not made it promises so.
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

  /// `communicators` and `kernels` outlive what is enqueued.
  StreamExecutors(std::shared_ptr<Communicators> communicators, const StreamKernels& kernels, Allocate allocate, Threads threads);
  ~StreamExecutors() override;

  bool needsAgreement() const override { return true; }
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
