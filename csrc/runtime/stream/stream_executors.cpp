#include "runtime/stream/stream_executors.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/calls/closable_post.h"
#include "runtime/stream/stream_executor.h"

namespace xmesh::runtime {

/// What the stream uses of one call, until it has passed it.
struct StreamExecutors::Call {
  // The network's thread's.
  StartTerms terms;                          ///< proposed; its generations, then agreed
  uint64_t place = 0;                        ///< in the line's order
  std::vector<std::shared_ptr<void>> holds;  ///< keep the proposed communicators, until the call has them
  bool is_done = false;
  std::atomic<bool> is_canceled = false;

  // The line's thread's once the call is launched, then the network's again. What is left of it after the network ends on either.
  Execution execution;
  std::unique_ptr<StreamExecutor> executor;
  /// The transport among the participants, then one for each circle of the program; null for a circle that this rank is not in.
  std::vector<std::shared_ptr<transport::StreamTransport>> transports;
  std::shared_ptr<void> staging;
};

namespace {

/// Those that a call uses on this rank, in the order in which all ranks make them; with their places in StartTerms::generations.
template <typename Visit>
void forEachCommunicator(const PreparedPlan& prepared, Visit visit) {
  visit(size_t{0}, prepared.terms.participants);
  for (size_t i = 0; i < prepared.circles.size(); ++i) {
    if (prepared.circles[i].has_value()) {
      visit(i + 1, *prepared.circles[i]);
    }
  }
}

}  // namespace

struct StreamExecutors::Shared {
  Shared(Line own_line, Allocate own_allocate, Threads own_threads)
      : line(std::move(own_line)), allocate(std::move(own_allocate)), on_line(std::move(own_threads.line)), network(std::move(own_threads.network)) {}

  const Line line;
  const Allocate allocate;
  const Post on_line;
  ClosablePost network;

  std::atomic<int64_t> staged_bytes = 0;
  std::atomic<int64_t> peak_staged_bytes = 0;

  void propose(const std::shared_ptr<Shared>& self, const std::shared_ptr<Call>& call);
  void launch(const std::shared_ptr<Shared>& self, const std::shared_ptr<Call>& call);
  void enqueue(const std::shared_ptr<Shared>& self, const std::shared_ptr<Call>& call);
  void end(const std::shared_ptr<Call>& call, std::optional<transport::StreamFailure> failure);
};

void StreamExecutors::Shared::propose(const std::shared_ptr<Shared>& self, const std::shared_ptr<Call>& call) {
  const PreparedPlan& prepared = *call->execution.movement.prepared;
  call->terms.generations.resize(1 + prepared.circles.size());
  forEachCommunicator(prepared, [&](size_t i, const Participants& ranks) {
    Communicators::Proposal proposal = line.communicators->propose(ranks);
    call->terms.generations[i] = proposal.generation;
    call->holds.push_back(std::move(proposal.hold));
  });
  const auto held = [self, call](uint64_t turn) {
    self->network([call, turn] {
      if (!call->is_canceled && call->execution.on_held) {
        call->execution.on_held(turn);
      }
    });
  };
  const CallOrder::Place place = line.order->propose({line.group, call->execution.call}, {[self, call] { self->launch(self, call); }, held});
  call->place = place.id;
  call->terms.turn = place.turn;
}

/// Any thread: it is the call's turn.
void StreamExecutors::Shared::launch(const std::shared_ptr<Shared>& self, const std::shared_ptr<Call>& call) {
  on_line([self, call] {
    try {
      self->enqueue(self, call);
    } catch (const std::exception& error) {
      self->end(call, transport::StreamFailure{error.what(), -1});
    }
  });
}

void StreamExecutors::Shared::enqueue(const std::shared_ptr<Shared>& self, const std::shared_ptr<Call>& call) {
  if (call->is_canceled) {
    return end(call, std::nullopt);
  }
  const Movement& movement = call->execution.movement;
  const PreparedPlan& prepared = *movement.prepared;
  const Participants& participants = prepared.terms.participants;
  std::vector<int32_t> peers;
  for (const int32_t group_rank : prepared.program_peers) {
    peers.push_back(static_cast<int32_t>(std::find(participants.peers.begin(), participants.peers.end(), group_rank) - participants.peers.begin()));
  }
  std::vector<transport::StreamTransport*> circles;
  call->transports.resize(1 + prepared.circles.size());
  forEachCommunicator(
      prepared, [&](size_t i, const Participants& ranks) { call->transports[i] = line.communicators->of(ranks, call->terms.generations.at(i)); });
  call->holds.clear();
  for (size_t i = 1; i < call->transports.size(); ++i) {
    circles.push_back(call->transports[i].get());
  }
  transport::StreamTransport& transport = *call->transports.front();
  call->executor =
      std::make_unique<StreamExecutor>(prepared.program, transport, std::move(peers), movement.src, movement.dst, *line.kernels, std::move(circles));
  const int64_t num_bytes = call->executor->stagingBytes();
  if (num_bytes > 0) {
    call->staging = allocate(num_bytes);
  }
  const int64_t now = staged_bytes += num_bytes;
  if (now > peak_staged_bytes) {
    peak_staged_bytes = now;
  }
  try {
    if (movement.caller != nullptr) {
      transport.enqueue([call](void* stream) { call->execution.movement.caller->waitForCaller(stream); });
    }
    call->executor->enqueue(call->staging.get());
    if (movement.caller != nullptr) {
      transport.enqueue([call](void* stream) { call->execution.movement.caller->markEnd(stream); });
    }
    if (call->execution.on_enqueued) {
      call->execution.on_enqueued();
    }
  } catch (const std::exception& error) {
    for (const auto& used : call->transports) {
      if (used != nullptr) {
        used->abort({error.what(), -1});  // what is enqueued keeps its memory until the stream has passed it
      }
    }
  }
  const auto passed = [self, call, num_bytes](const transport::StreamFailure* failure) {
    self->staged_bytes -= num_bytes;
    call->transports.clear();  // here, not on the network's thread: the last one to hold a communicator ends it
    self->end(call, failure == nullptr ? std::nullopt : std::optional(*failure));
  };
  try {
    transport.whenReached(passed);
  } catch (const std::exception&) {
    new std::shared_ptr<void>(call->execution.movement.keep_alive);  // NOLINT(bugprone-unused-raii): nobody can say when the device is done with them
    new std::shared_ptr<void>(call->staging);                        // NOLINT(bugprone-unused-raii)
    throw;
  }
}

/// Any thread.
void StreamExecutors::Shared::end(const std::shared_ptr<Call>& call, std::optional<transport::StreamFailure> failure) {
  network([call, failure = std::move(failure), communicators = line.communicators] {
    call->is_done = true;
    call->staging.reset();
    Movement& movement = call->execution.movement;
    movement.keep_alive.reset();
    if (call->is_canceled) {
      return;
    }
    if (!failure.has_value()) {
      return call->execution.on_done();
    }
    const Participants& participants = movement.prepared->terms.participants;
    forEachCommunicator(*movement.prepared,
                        [&](size_t i, const Participants& ranks) { communicators->abort(ranks, call->terms.generations.at(i), *failure); });
    call->execution.on_failed(failure->reason, failure->peer < 0 ? -1 : participants.peers.at(static_cast<size_t>(failure->peer)));
  });
}

namespace {

/// What the other calls on a communicator fail with when one is given up.
transport::StreamFailure failureOfOthers(const Failure& why, const Participants& participants) {
  const std::vector<int64_t>& ranks = participants.ranks;
  const auto found = why.blamed_ranks.empty() ? ranks.end() : std::find(ranks.begin(), ranks.end(), why.blamed_ranks.front());
  return {"another call on its communicator has failed: " + why.text, found == ranks.end() ? -1 : static_cast<int32_t>(found - ranks.begin())};
}

class StreamRun final : public Executor {
 public:
  StreamRun(std::shared_ptr<StreamExecutors::Shared> shared, std::shared_ptr<StreamExecutors::Call> call)
      : shared_(std::move(shared)), call_(std::move(call)) {}
  StreamRun(const StreamRun&) = delete;
  StreamRun& operator=(const StreamRun&) = delete;
  ~StreamRun() override { cancel({FailureKind::kGroup, "the call was given up", {}}); }

  StartTerms proposal() const override { return call_->terms; }
  void start(const StartTerms& agreed) override {
    call_->terms.generations = agreed.generations;
    shared_->line.order->agree(call_->place, agreed.turn);
  }
  void comesAfter(uint64_t turn) override { shared_->line.order->comesAfter(call_->place, turn); }
  void cancel(const Failure& why) override {
    if (call_->is_done || call_->is_canceled) {
      return;
    }
    call_->is_canceled = true;
    if (!shared_->line.order->leave(call_->place)) {
      forEachCommunicator(*call_->execution.movement.prepared, [this, &why](size_t i, const Participants& ranks) {
        shared_->line.communicators->abort(ranks, call_->terms.generations.at(i), failureOfOthers(why, ranks));
      });
    }
  }
  void abandon() override {
    call_->is_canceled = true;
    shared_->line.order->leave(call_->place);
  }
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

StreamExecutors::StreamExecutors(Line line, Allocate allocate, Threads threads)
    : shared_(std::make_shared<Shared>(std::move(line), std::move(allocate), std::move(threads))) {}

StreamExecutors::~StreamExecutors() { disconnect(); }

std::unique_ptr<Executor> StreamExecutors::make(Execution execution) {
  execution.movement.prepared->program->checkLocalTensors(execution.movement.src, execution.movement.dst);
  auto call = std::make_shared<Call>();
  call->execution = std::move(execution);
  shared_->propose(shared_, call);
  return std::make_unique<StreamRun>(shared_, std::move(call));
}

void StreamExecutors::promise(uint64_t turn) { shared_->line.order->promise(turn); }

void StreamExecutors::disconnect() { shared_->network.close(); }

int64_t StreamExecutors::peakStagingBytes() const { return shared_->peak_staged_bytes; }

}  // namespace xmesh::runtime
