#include "runtime/calls/reshard_service.h"

#include <utility>

namespace xmesh::runtime {

ReshardService::ReshardService(Options options, const MakeNetworks& make_networks)
    : peers_(std::move(options.numbers), options.group_rank),
      refusals_(mailbox_, peers_, history_),
      arrivals_(mailbox_, peers_, history_),
      calls_(peers_, history_, refusals_, arrivals_) {
  Networks made = make_networks(*this);
  address_ = std::move(made.address);
  network_ = std::move(made.control);
  executors_ = std::move(made.executors);
  mailbox_.connect(*network_);
  peers_.connect(*network_, address_);
  calls_.connect(*network_, *executors_);
}

ReshardService::~ReshardService() { close(std::chrono::milliseconds(0)); }

void ReshardService::setAddress(int32_t peer, const std::string& address) {
  if (!mailbox_.post([this, peer, address] { peers_.setAddress(peer, address); })) {
    throw GroupError("the process group is closed: no reshard can start on it");
  }
}

std::shared_ptr<ReshardCall> ReshardService::reshard(ReshardRequest request) {
  Call call;
  call.kind = CallKind::kReshard;
  call.terms = std::shared_ptr<const CallTerms>(request.movement.prepared, &request.movement.prepared->terms);
  call.key = {call.terms->participants.hash, request.lane, 0};
  call.timeout = request.timeout;
  call.movement = std::move(request.movement);
  return begin(std::move(call), request.is_detached);
}

std::shared_ptr<ReshardCall> ReshardService::transfer(TransferRequest request) {
  Call call;
  call.kind = CallKind::kTransfer;
  call.key = request.key;
  call.terms = std::shared_ptr<const CallTerms>(request.movement.prepared, &request.movement.prepared->terms);
  call.watch = request.watch;
  call.phase = request.phase;
  call.describe = std::move(request.describe);
  call.movement = std::move(request.movement);
  return begin(std::move(call));
}

std::shared_ptr<ReshardCall> ReshardService::meet(MeetingRequest request) {
  Call call;
  call.kind = CallKind::kMeeting;
  call.key = request.key;
  call.terms = std::move(request.terms);
  call.watch = request.watch;
  call.timeout = request.timeout;
  return begin(std::move(call));
}

std::shared_ptr<ReshardCall> ReshardService::watch(WatchRequest request) {
  Call call;
  call.kind = CallKind::kWatch;
  call.key = request.key;
  call.terms = std::move(request.terms);
  call.timeout = request.timeout;
  call.pipeline = request.pipeline;
  call.describe = std::move(request.describe);
  return begin(std::move(call));
}

std::shared_ptr<ReshardCall> ReshardService::begin(Call call, bool is_detached) {
  const std::lock_guard lock(mutex_);
  if (mailbox_.isClosed()) {
    throw GroupError("the process group is closed: no reshard can start on it");
  }
  if (call.kind == CallKind::kReshard && call.key.lane == 0) {
    call.key = refusals_.next(call.terms->participants);
  }
  auto handle = std::make_shared<ReshardCall>(call.key, is_detached);
  // On a device too the caller has its tensors again before the call has ended.
  if (is_detached || (call.movement.has_value() && call.movement->route.device_kind != 0)) {
    detached_.emplace(handle.get(), handle);
    handle->onCompletion([this, ended = handle.get()] {
      const std::lock_guard ended_lock(mutex_);
      detached_.erase(ended);
    });
  }
  const bool is_held = call.kind == CallKind::kTransfer;
  call.handle = handle;
  begun_.push_back(std::move(call));
  ++num_held_;
  if (!is_held) {
    postHeld();
  }
  return handle;
}

void ReshardService::flush() {
  const std::lock_guard lock(mutex_);
  if (num_held_ > 0) {
    postHeld();
  }
}

void ReshardService::postHeld() {
  mailbox_.post([this, num_calls = std::exchange(num_held_, 0)] { startBegun(num_calls); });
}

void ReshardService::startBegun(size_t num_calls) {
  for (; num_calls > 0; --num_calls) {
    Call call;
    {
      const std::lock_guard lock(mutex_);
      call = std::move(begun_.front());
      begun_.pop_front();
    }
    calls_.start(std::move(call));
  }
}

void ReshardService::failCall(const CallKey& key, Failure failure) {
  mailbox_.post([this, key, failure = std::move(failure)] { calls_.fail(key, failure); });
}

void ReshardService::suspect(const CallKey& key) {
  mailbox_.post([this, key] { calls_.askAround(key); });
}

void ReshardService::release(const CallKey& watch, std::optional<Failure> farewell) {
  mailbox_.post([this, watch, farewell = std::move(farewell)] { calls_.release(watch, farewell); });
}

void ReshardService::onControl(int32_t peer, std::string message) {
  try {
    switch (controlKind(message)) {
      case ControlKind::kCallNotice:
        return calls_.hear(peer, decodeCallNotice(message));
      case ControlKind::kFail:
        return calls_.hear(peer, decodeFail(message));
      case ControlKind::kQuestion:
        return calls_.hear(peer, decodeQuestion(message));
      case ControlKind::kAnswer:
        return calls_.hear(peer, decodeAnswer(message));
      case ControlKind::kTurnRequest:
        return calls_.hear(peer, decodeTurnRequest(message));
      case ControlKind::kUnnamedRefusals:
        return calls_.hear(peer, decodeUnnamedRefusals(message));
      case ControlKind::kArrival:
        return calls_.hear(peer, decodeArrival(message));
      case ControlKind::kReturn:
        return arrivals_.hear(peer, decodeReturn(message));
      case ControlKind::kIntroduction:
        return peers_.hear(peer, decodeIntroduction(message));
    }
    throw std::runtime_error("its kind is unknown");
  } catch (const std::exception& error) {
    onPeerLost(peer, std::string("it sent a control message that cannot be read: ") + error.what(), false);
  }
}

void ReshardService::onPeerLost(int32_t peer, const std::string& reason, bool is_goodbye) {
  const LostPeer& lost = peers_.lose(peer, reason, is_goodbye);
  refusals_.releaseWaiter();
  arrivals_.lose(peer);
  calls_.lose(peer, lost, is_goodbye);
}

void ReshardService::close(std::chrono::milliseconds drain) noexcept {
  std::map<const ReshardCall*, std::shared_ptr<ReshardCall>> detached;
  {
    const std::lock_guard lock(mutex_);
    if (!mailbox_.close()) {
      return;
    }
    detached = detached_;
  }
  const auto deadline = std::chrono::steady_clock::now() + drain;
  for (const auto& [key, call] : detached) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    try {
      if (left.count() > 0) {
        call->waitThrough(left);
      }
    } catch (const std::exception&) {
      continue;  // its own waiter hears of it
    }
  }
  network_->post([this] { calls_.tellUndone(); });
  executors_->disconnect();
  // Joins the thread: from here on nobody else touches the calls. reset() would clear network_ first, which tasks still use.
  delete network_.get();
  static_cast<void>(network_.release());
  calls_.abandon();
  for (const Call& call : std::exchange(begun_, {})) {
    call.handle->complete(Failure{FailureKind::kGroup, "the process group was closed before the call could start", {}});
  }
  refusals_.releaseWaiter(true);
  arrivals_.close();
}

}  // namespace xmesh::runtime
