#include "runtime/host/mirrored_executors.h"

#include <string>
#include <utility>
#include <vector>

namespace xmesh::runtime {

namespace {

/// One call between its mirrors and the executor that moves them. The network's thread.
struct Mirrored {
  std::shared_ptr<ClosablePost> network;
  std::shared_ptr<Mirrors> mirrors;
  std::function<void()> on_done;
  std::function<void()> on_enqueued;
  std::function<void(const std::string& reason, int32_t peer)> on_failed;
  std::unique_ptr<Executor> host;
  int32_t own_group_rank = -1;
  bool is_over = false;

  void giveUp() {
    is_over = true;
    mirrors->giveUp();
  }
};

/// Goes on with `next` on the network's thread once the device is done, unless the call is over by then.
Mirrors::Told then(const std::shared_ptr<Mirrored>& call, std::function<void()> next) {
  return [call, next = std::move(next)](const std::string* error) {
    (*call->network)([call, next, reason = error == nullptr ? std::string() : *error, failed = error != nullptr] {
      if (call->is_over) {
        return;
      }
      if (failed) {
        call->giveUp();
        call->on_failed(reason, call->own_group_rank);
      } else {
        next();
      }
    });
  };
}

/// All is in the mirrors of the destinations.
void hasArrived(const std::shared_ptr<Mirrored>& call) {
  call->mirrors->store(call->on_enqueued, then(call, [call] {
                         call->is_over = true;
                         call->on_done();
                       }));
}

class MirroredExecutor final : public Executor {
 public:
  explicit MirroredExecutor(std::shared_ptr<Mirrored> call) : call_(std::move(call)) {}
  MirroredExecutor(const MirroredExecutor&) = delete;
  MirroredExecutor& operator=(const MirroredExecutor&) = delete;
  ~MirroredExecutor() override {
    call_->giveUp();
    call_->host.reset();
  }

  void start(const StartTerms& agreed) override {
    call_->mirrors->fetch(then(call_, [call = call_.get(), agreed] { call->host->start(agreed); }));
  }
  void cancel(const Failure& why) override {
    call_->giveUp();
    call_->host->cancel(why);
  }
  void abandon() override {
    call_->giveUp();
    call_->host->abandon();
  }
  std::vector<PeerProgress> progress() const override { return call_->host->progress(); }

 private:
  const std::shared_ptr<Mirrored> call_;
};

}  // namespace

MirroredExecutors::MirroredExecutors(Executors& host, ClosablePost::Post network)
    : host_(host), network_(std::make_shared<ClosablePost>(std::move(network))) {}

MirroredExecutors::~MirroredExecutors() { disconnect(); }

std::unique_ptr<Executor> MirroredExecutors::make(Execution execution) {
  auto call = std::make_shared<Mirrored>();
  call->network = network_;
  call->mirrors = execution.movement.mirrors;
  const Participants& participants = execution.movement.prepared->terms.participants;
  call->own_group_rank = participants.peers.at(static_cast<size_t>(participants.my_index));
  call->on_enqueued = std::move(execution.on_enqueued);
  call->on_failed = std::move(execution.on_failed);
  call->on_done = std::exchange(execution.on_done, [weak = std::weak_ptr(call)] {
    if (const std::shared_ptr<Mirrored> alive = weak.lock()) {
      hasArrived(alive);
    }
  });
  execution.movement.writes_once_agreed = false;  // a call that is compared starts once they have
  call->host = host_.make(std::move(execution));
  return std::make_unique<MirroredExecutor>(std::move(call));
}

void MirroredExecutors::disconnect() { network_->close(); }

}  // namespace xmesh::runtime
