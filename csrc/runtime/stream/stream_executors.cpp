#include "runtime/stream/stream_executors.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

namespace xmesh::runtime {

/// What the stream uses of one call, until it has passed it.
struct StreamExecutors::Call {
  std::unique_ptr<StreamExecutor> executor;
  Execution execution;
  std::shared_ptr<void> staging;
  bool may_start = false;
  bool is_done = false;
  bool is_canceled = false;
};

struct StreamExecutors::Shared {
  Shared(transport::StreamTransport& own_transport, const StreamKernels& own_kernels, Allocate own_allocate, int64_t own_staging_bytes)
      : transport(own_transport), kernels(own_kernels), allocate(std::move(own_allocate)), staging_bytes(own_staging_bytes) {}

  transport::StreamTransport& transport;
  const StreamKernels& kernels;
  const Allocate allocate;
  const int64_t staging_bytes;
  std::mutex mutex;
  Post post;  ///< guarded by mutex; empty once the network is gone

  // The network's thread only.
  std::deque<std::shared_ptr<Call>> waiting;  ///< not enqueued, in the order in which they were made

  std::atomic<int64_t> staged_bytes = 0;
  std::atomic<int64_t> peak_staged_bytes = 0;

  void enqueue(const std::shared_ptr<Shared>& self, const std::shared_ptr<Call>& call);
  void enqueueWaiting(const std::shared_ptr<Shared>& self);
};

/// Enqueues what may start, up to the first that may not.
void StreamExecutors::Shared::enqueueWaiting(const std::shared_ptr<Shared>& self) {
  while (!waiting.empty() && (waiting.front()->may_start || waiting.front()->is_canceled)) {
    const std::shared_ptr<Call> call = std::move(waiting.front());
    waiting.pop_front();
    if (!call->is_canceled) {
      enqueue(self, call);
    }
  }
}

void StreamExecutors::Shared::enqueue(const std::shared_ptr<Shared>& self, const std::shared_ptr<Call>& call) {
  const int64_t num_bytes = call->executor->stagingBytes();
  if (num_bytes > 0) {
    call->staging = allocate(num_bytes);
  }
  const int64_t now = staged_bytes += num_bytes;
  if (now > peak_staged_bytes) {
    peak_staged_bytes = now;
  }
  call->executor->enqueue(call->staging.get());
  transport.whenReached([self, call, num_bytes] {
    self->staged_bytes -= num_bytes;
    const std::lock_guard lock(self->mutex);
    if (self->post) {
      self->post([call] {
        call->is_done = true;
        call->staging.reset();
        call->execution.movement.keep_alive.reset();
        if (!call->is_canceled) {
          call->execution.on_done();
        }
      });
    }
  });
}

namespace {

class StreamRun final : public Executor {
 public:
  StreamRun(std::shared_ptr<StreamExecutors::Shared> shared, std::shared_ptr<StreamExecutors::Call> call)
      : shared_(std::move(shared)), call_(std::move(call)) {}
  StreamRun(const StreamRun&) = delete;
  StreamRun& operator=(const StreamRun&) = delete;
  ~StreamRun() override { cancel(); }

  void start() override {
    call_->may_start = true;
    shared_->enqueueWaiting(shared_);
  }
  void cancel() override {
    if (!call_->is_done) {
      call_->is_canceled = true;
      shared_->enqueueWaiting(shared_);
    }
  }
  void abandon() override { call_->is_canceled = true; }
  std::vector<PeerProgress> progress() const override {
    std::vector<PeerProgress> out;
    const Program& program = *call_->execution.movement.prepared->program;
    for (const int64_t rank : program.peers()) {
      out.push_back({rank, 0, 0, 0, 0});
    }
    for (const SendStep& step : program.sends) {
      ++out[static_cast<size_t>(step.peer)].num_sends;
    }
    for (const ReceiveStep& step : program.receives) {
      ++out[static_cast<size_t>(step.peer)].num_receives;
    }
    for (PeerProgress& peer : out) {
      peer.num_sent = call_->is_done ? peer.num_sends : 0;
      peer.num_received = call_->is_done ? peer.num_receives : 0;
    }
    return out;
  }

 private:
  const std::shared_ptr<StreamExecutors::Shared> shared_;
  const std::shared_ptr<StreamExecutors::Call> call_;
};

}  // namespace

StreamExecutors::StreamExecutors(transport::StreamTransport& transport, const StreamKernels& kernels, Allocate allocate, Post post,
                                 int64_t staging_bytes)
    : shared_(std::make_shared<Shared>(transport, kernels, std::move(allocate), staging_bytes)) {
  shared_->post = std::move(post);
}

StreamExecutors::~StreamExecutors() { abandon(); }

std::unique_ptr<Executor> StreamExecutors::make(Execution execution) {
  auto call = std::make_shared<Call>();
  const PreparedPlan& prepared = *execution.movement.prepared;
  call->executor = std::make_unique<StreamExecutor>(prepared.program, shared_->transport, prepared.program_peers, execution.movement.src,
                                                    execution.movement.dst, shared_->kernels, StreamExecutor::Options{shared_->staging_bytes});
  call->execution = std::move(execution);
  shared_->waiting.push_back(call);
  return std::make_unique<StreamRun>(shared_, std::move(call));
}

void StreamExecutors::abandon() {
  const std::lock_guard lock(shared_->mutex);
  shared_->post = nullptr;
}

int64_t StreamExecutors::peakStagingBytes() const { return shared_->peak_staged_bytes; }

}  // namespace xmesh::runtime
