#include "runtime/reshard_service.h"

#include <algorithm>
#include <utility>

namespace xmesh::runtime {
namespace {

int numRounds(size_t num_participants) {
  int rounds = 0;
  while ((size_t{1} << rounds) < num_participants) {
    ++rounds;
  }
  return rounds;
}

}  // namespace

ReshardService::ReshardService(Options options, const MakeNetworks& make_networks) : options_(std::move(options)) {
  Networks made = make_networks(*this);
  network_ = std::move(made.control);
  executors_ = std::move(made.executors);
}

ReshardService::~ReshardService() { close(std::chrono::milliseconds(0)); }

void ReshardService::setAddress(int32_t peer, const std::string& address) {
  const std::lock_guard lock(mutex_);
  if (is_closed_) {
    throw GroupError("the process group is closed: no reshard can start on it");
  }
  network_->post([this, peer, address] { network_->setAddress(peer, address); });
}

std::shared_ptr<ReshardCall> ReshardService::begin(CallRequest request) {
  const std::lock_guard lock(mutex_);
  if (is_closed_) {
    throw GroupError("the process group is closed: no reshard can start on it");
  }
  const uint64_t participants = request.prepared->participants_hash;
  if (!request.key.has_value() && request.lane == 0 && !refusals_.empty()) {
    countRefusals(request.prepared->participants, participants);
  }
  const CallKey key =
      request.key.has_value() ? *request.key : CallKey{participants, request.lane, request.lane == 0 ? next_count_[participants]++ : 0};
  const bool is_held = request.is_held;
  auto handle = std::make_shared<ReshardCall>(key, std::move(request));
  if (handle->isDetached()) {
    detached_.insert(handle);
  }
  begun_.push_back(handle);
  ++num_held_;
  if (!is_held) {
    postHeld();
  }
  return handle;
}

void ReshardService::flush() {
  const std::lock_guard lock(mutex_);
  if (num_held_ > 0 && !is_closed_) {
    postHeld();
  }
}

void ReshardService::postHeld() {
  network_->post([this, num_calls = std::exchange(num_held_, 0)] { startBegun(num_calls); });
}

void ReshardService::startBegun(size_t num_calls) {
  for (; num_calls > 0; --num_calls) {
    std::shared_ptr<ReshardCall> handle;
    {
      const std::lock_guard lock(mutex_);
      handle = std::move(begun_.front());
      begun_.pop_front();
    }
    try {
      startCall(handle);
    } catch (const std::exception& error) {
      fail(handle->key(), {FailureKind::kGroup, std::string("a reshard could not start: ") + error.what(), {}}, true);
    }
  }
}

void ReshardService::failCall(const CallKey& key, Failure failure) {
  const std::lock_guard lock(mutex_);
  if (!is_closed_) {
    network_->post([this, key, failure = std::move(failure)] { fail(key, failure, true); });
  }
}

void ReshardService::suspect(const CallKey& key) {
  const std::lock_guard lock(mutex_);
  if (!is_closed_) {
    network_->post([this, key] { askAround(key); });
  }
}

void ReshardService::release(const CallKey& watch, std::optional<Failure> farewell) {
  const std::lock_guard lock(mutex_);
  if (is_closed_) {
    return;
  }
  network_->post([this, watch, farewell = std::move(farewell)] {
    if (const auto found = calls_.find(watch); found != calls_.end()) {
      ActiveCall call = std::move(found->second);
      for (const int32_t peer : call.request.prepared->participant_peers) {
        if (farewell.has_value() && peer != options_.group_rank && !lost_.contains(peer)) {
          network_->sendControl(peer, encode(FailNotice{watch, *farewell, {}}));
        }
      }
      calls_.erase(found);
      network_->cancelTimer(call.timer);
      end(call, std::nullopt);
    }
  });
}

std::unique_ptr<Executor> ReshardService::makeExecutor(const CallKey& key, CallRequest& request) {
  Execution execution;
  execution.call = operationOf(key, request.prepared->fingerprint);
  execution.prepared = request.prepared;
  execution.src = std::move(request.src);
  execution.dst = std::move(request.dst);
  execution.keep_alive = request.keep_alive;
  execution.on_done = [this, key] {
    // Later, not now: the executor must not be destroyed inside its own callback.
    network_->post([this, key] {
      if (const auto call = calls_.find(key); call != calls_.end()) {
        call->second.is_moved = true;
        if (call->second.handle->isDetached()) {
          call->second.handle->markMoved();
        }
        finishIfDone(key);
      }
    });
  };
  return executors_->make(std::move(execution));
}

void ReshardService::startCall(const std::shared_ptr<ReshardCall>& handle) {
  const CallKey key = handle->key();
  CallRequest request = handle->takeRequest();
  if (key.lane == 0) {
    started_[key.participants] = key.count + 1;
  }
  if (!request.key.has_value()) {
    last_call_ =
        "reshard call " + std::to_string(key.count) + " of ranks " + rankList(request.prepared->participants) + ": " + request.prepared->summary;
  }
  ActiveCall& call = calls_[key];
  call.handle = handle;
  call.request = std::move(request);
  call.num_rounds = call.request.is_agreed ? 0 : numRounds(call.request.prepared->participants.size());
  EarlyNews early;
  if (const auto found = early_.find(key); found != early_.end()) {
    early = std::move(found->second);
    early_.erase(found);
  }
  if (early.failure.has_value()) {
    fail(key, *early.failure, true);
    return;
  }
  if (!joinWatch(key, call)) {
    return;
  }
  // Of a call that is agreed, those that this rank has no messages with may have done their part and left.
  const bool is_agreed = call.request.is_agreed && call.request.prepared->program != nullptr;
  for (const int32_t peer : is_agreed ? call.request.prepared->program_peers : call.request.prepared->participant_peers) {
    if (const auto lost = lost_.find(peer); lost != lost_.end()) {
      fail(key,
           {FailureKind::kPeer,
            callText(key, call) + " cannot start: rank " + std::to_string(globalRank(peer)) + " is lost (" + lost->second.reason + ")",
            lost->second.blamed_ranks},
           true);
      return;
    }
  }
  if (call.request.timeout.count() > 0 && !call.request.is_watch) {
    call.timer = network_->startTimer(call.request.timeout, [this, key] { askAround(key); });
  }
  if (call.request.prepared->program != nullptr) {
    call.executor = makeExecutor(key, call.request);
  } else {
    call.is_moved = !call.request.is_watch;
  }
  if (call.request.arrival > 0) {
    if (const std::optional<Failure> conflict = arrivalConflict(call.request.prepared->participants, call.request.arrival)) {
      fail(key, *conflict, true);
      return;
    }
    for (OwnArrival& own : own_arrivals_) {
      for (const int32_t peer : call.request.prepared->participant_peers) {
        tellArrival(own, peer);
      }
    }
  }
  for (const int32_t peer : call.request.prepared->participant_peers) {
    askAboutRefusals(key, call, peer);
  }
  if (call.num_rounds > 0) {
    sendHello(key, call);
  }
  if (call.executor == nullptr) {
    if (call.num_rounds == 0) {
      finishIfDone(key);
    }
  } else if (call.num_rounds == 0 || !executors_->needsAgreement()) {
    call.executor->start();
  }
  for (auto& [peer, hello] : early.hellos) {
    takeHello(peer, std::move(hello));
  }
}

void ReshardService::sendHello(const CallKey& key, ActiveCall& call) {
  const PreparedPlan& prepared = *call.request.prepared;
  const int64_t distance = int64_t{1} << call.rounds_done;
  network_->sendControl(prepared.participantAt(distance),
                        encode(Hello{key, static_cast<uint8_t>(call.rounds_done), prepared.fingerprint, prepared.fields}));
}

void ReshardService::takeHello(int32_t peer, Hello hello) {
  const CallKey key = hello.key;
  const auto found = calls_.find(key);
  if (found == calls_.end()) {
    if (const auto failed = failed_.find(key); failed != failed_.end()) {
      network_->sendControl(peer, encode(FailNotice{key, failed->second, {}}));
    } else if (!isPast(key) && early_.size() < kMaxEarlyCalls) {
      early_[key].hellos.emplace_back(peer, std::move(hello));
      if (!told_.contains(peer) && numRefusals() > 0) {
        tellRefusals(peer);
      }
    }
    return;
  }
  ActiveCall& call = found->second;
  const PreparedPlan& prepared = *call.request.prepared;
  if (hello.fingerprint != prepared.fingerprint) {
    const std::string what = firstDifference(prepared.fields, globalRank(options_.group_rank), hello.fields, globalRank(peer));
    fail(key, {FailureKind::kMistake, callText(key, call) + ": ranks disagree on " + what, {}}, true);
    return;
  }
  call.hellos.emplace(hello.round, std::move(hello));
  advanceAgreement(key);
}

void ReshardService::advanceAgreement(const CallKey& key) {
  ActiveCall& call = calls_.at(key);
  while (call.rounds_done < call.num_rounds && call.hellos.contains(static_cast<uint8_t>(call.rounds_done))) {
    call.hellos.erase(static_cast<uint8_t>(call.rounds_done));
    ++call.rounds_done;
    if (call.rounds_done < call.num_rounds) {
      sendHello(key, call);
    } else if (call.executor != nullptr && executors_->needsAgreement()) {
      call.executor->start();
    }
  }
  finishIfDone(key);
}

void ReshardService::finishIfDone(const CallKey& key) {
  const auto found = calls_.find(key);
  if (found == calls_.end() || !found->second.is_moved || found->second.rounds_done < found->second.num_rounds) {
    return;
  }
  ActiveCall call = std::move(found->second);
  calls_.erase(found);
  network_->cancelTimer(call.timer);
  if (call.executor != nullptr) {
    call.executor->cancel();
  }
  if (call.request.watch.has_value()) {
    if (const auto watch = calls_.find(*call.request.watch); watch != calls_.end()) {
      watch->second.watched.erase(key);
    }
  }
  end(call, std::nullopt);
}

void ReshardService::end(ActiveCall& call, const std::optional<Failure>& failure) {
  call.executor.reset();
  call.request = {};  // the tensors are free before anybody is told
  if (call.handle->isDetached()) {
    const std::lock_guard lock(mutex_);
    detached_.erase(call.handle);
  }
  call.handle->complete(failure);
}

void ReshardService::onControl(int32_t peer, std::string message) {
  try {
    takeControl(peer, message);
  } catch (const std::exception& error) {
    onPeerLost(peer, std::string("it sent a control message that cannot be read: ") + error.what(), false);
  }
}

void ReshardService::takeControl(int32_t peer, const std::string& message) {
  switch (controlKind(message)) {
    case ControlKind::kHello:
      takeHello(peer, decodeHello(message));
      return;
    case ControlKind::kFail:
      takeFailNotice(peer, decodeFail(message));
      return;
    case ControlKind::kQuestion:
      takeQuestion(peer, decodeQuestion(message));
      return;
    case ControlKind::kAnswer:
      takeAnswer(peer, decodeAnswer(message));
      return;
    case ControlKind::kUnnamedRefusals:
      takeUnnamedRefusals(peer, decodeUnnamedRefusals(message));
      return;
    case ControlKind::kArrival:
      takeArrival(peer, decodeArrival(message));
      return;
  }
}

bool ReshardService::isPast(const CallKey& key) const {
  if (key.lane != 0) {
    return failed_.contains(key);
  }
  const auto started = started_.find(key.participants);
  return started != started_.end() && key.count < started->second;
}

void ReshardService::close(std::chrono::milliseconds drain) noexcept {
  std::set<std::shared_ptr<ReshardCall>> detached;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(is_closed_, true)) {
      return;
    }
    detached = detached_;
  }
  const auto deadline = std::chrono::steady_clock::now() + drain;
  for (const std::shared_ptr<ReshardCall>& call : detached) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    try {
      if (left.count() > 0) {
        call->wait(left);
      }
    } catch (const std::exception&) {
      continue;  // its own waiter hears of it
    }
  }
  // Joins the thread: from here on nobody else touches the calls. reset() would clear network_ first, which tasks still use.
  delete network_.get();
  static_cast<void>(network_.release());
  for (auto& [key, call] : calls_) {
    if (call.executor != nullptr) {
      call.executor->abandon();
    }
  }
  executors_->abandon();
  for (auto& [key, call] : calls_) {
    call.handle->complete(Failure{FailureKind::kGroup, callText(key, call) + ": the process group was closed while it was in flight", {}});
  }
  calls_.clear();
  for (const std::shared_ptr<ReshardCall>& call : begun_) {
    call->complete(Failure{FailureKind::kGroup, "the process group was closed before the call could start", {}});
  }
  begun_.clear();
  if (waiter_.has_value()) {
    waiter_->settled->set_value();
    waiter_.reset();
  }
}

}  // namespace xmesh::runtime
