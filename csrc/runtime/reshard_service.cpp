#include "runtime/reshard_service.h"

#include <algorithm>
#include <utility>

namespace xmesh::runtime {
namespace {

constexpr std::chrono::milliseconds kAnswerTime{2000};
constexpr size_t kMaxFailed = 4096;
constexpr size_t kMaxEarlyCalls = 1U << 16U;

int numRounds(size_t num_participants) {
  int rounds = 0;
  while ((size_t{1} << rounds) < num_participants) {
    ++rounds;
  }
  return rounds;
}

/// The participant `distance` places after (or, negative, before) this rank's, around the circle.
int32_t neighbour(const PreparedPlan& prepared, int64_t distance) {
  const auto count = static_cast<int64_t>(prepared.participants.size());
  return prepared.participant_peers[static_cast<size_t>(((prepared.my_index + distance) % count + count) % count)];
}

std::string rankList(const std::vector<int64_t>& ranks) {
  constexpr size_t kMost = 16;
  std::string out;
  for (size_t i = 0; i < ranks.size() && i < kMost; ++i) {
    out += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  }
  return "[" + out + (ranks.size() > kMost ? ", ..." : "") + "]";
}

}  // namespace

ReshardService::ReshardService(Options options, const MakeNetwork& make_network) : options_(std::move(options)), staging_(options_.staging_bytes) {
  network_ = make_network(*this);
  pacer_.emplace(*network_);
}

ReshardService::~ReshardService() { close(std::chrono::milliseconds(0)); }

std::shared_ptr<ReshardCall> ReshardService::begin(CallRequest request) {
  const std::lock_guard lock(mutex_);
  if (is_closed_) {
    throw GroupError("the process group is closed: no reshard can start on it");
  }
  const uint64_t participants = request.prepared->participants_hash;
  const CallKey key =
      request.key.has_value() ? *request.key : CallKey{participants, request.lane, request.lane == 0 ? next_count_[participants]++ : 0};
  auto handle = std::make_shared<ReshardCall>(key, request.is_detached);
  if (request.is_detached) {
    detached_.insert(handle);
  }
  network_->post([this, handle, request = std::move(request)]() mutable {
    try {
      startCall(handle, std::move(request));
    } catch (const std::exception& error) {
      fail(handle->key(), {FailureKind::kGroup, std::string("a reshard could not start: ") + error.what(), {}}, true);
    }
  });
  return handle;
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

void ReshardService::release(const CallKey& watch) {
  const std::lock_guard lock(mutex_);
  if (is_closed_) {
    return;
  }
  network_->post([this, watch] {
    if (const auto found = calls_.find(watch); found != calls_.end()) {
      ActiveCall call = std::move(found->second);
      calls_.erase(found);
      network_->cancelTimer(call.timer);
      end(call, std::nullopt);
    }
  });
}

void ReshardService::refuse(const std::vector<int64_t>& participants, const std::vector<int32_t>& peers, const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (is_closed_) {
    return;
  }
  const uint64_t hash = hashRanks(participants);
  const CallKey key{hash, 0, next_count_[hash]++};
  network_->post([this, key, peers, text] {
    started_[key.participants] = key.count + 1;
    const Failure failure{FailureKind::kMistake, "rank " + std::to_string(globalRank(options_.group_rank)) + " refused this call: " + text, {}};
    early_.erase(key);
    remember(key, failure);
    last_call_ = "reshard call " + std::to_string(key.count) + ", which it refused: " + text;
    for (const int32_t peer : peers) {
      if (peer != options_.group_rank && !lost_.contains(peer) && network_->hasAddress(peer)) {
        network_->sendControl(peer, encode(FailNotice{key, failure}));
      }
    }
  });
}

std::unique_ptr<HostExecutor> ReshardService::makeExecutor(const CallKey& key, const CallRequest& request) {
  return std::make_unique<HostExecutor>(request.prepared->program, *network_, operationOf(key, request.prepared->fingerprint),
                                        request.prepared->program_peers, request.src, request.dst, staging_, [this, key] {
                                          // Later, not now: the executor must not be destroyed inside its own callback.
                                          network_->post([this, key] {
                                            if (const auto call = calls_.find(key); call != calls_.end()) {
                                              call->second.is_moved = true;
                                              finishIfDone(key);
                                            }
                                          });
                                        });
}

void ReshardService::startCall(const std::shared_ptr<ReshardCall>& handle, CallRequest request) {
  const CallKey key = handle->key();
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
    pacer_->callStarted(call.request.prepared->pacing);
  } else {
    call.is_moved = !call.request.is_watch;
  }
  if (call.num_rounds > 0) {
    sendHello(key, call);
  }
  if (call.executor != nullptr) {
    call.executor->start();
  } else if (call.num_rounds == 0) {
    finishIfDone(key);
  }
  for (auto& [peer, hello] : early.hellos) {
    takeHello(peer, std::move(hello));
  }
}

void ReshardService::sendHello(const CallKey& key, ActiveCall& call) {
  const PreparedPlan& prepared = *call.request.prepared;
  const int64_t distance = int64_t{1} << call.rounds_done;
  network_->sendControl(neighbour(prepared, distance),
                        encode(Hello{key, static_cast<uint8_t>(call.rounds_done), prepared.fingerprint, prepared.fields}));
}

void ReshardService::takeHello(int32_t peer, Hello hello) {
  const CallKey key = hello.key;
  const auto found = calls_.find(key);
  if (found == calls_.end()) {
    if (const auto failed = failed_.find(key); failed != failed_.end()) {
      network_->sendControl(peer, encode(FailNotice{key, failed->second}));
    } else if (!isPast(key) && early_.size() < kMaxEarlyCalls) {
      early_[key].hellos.emplace_back(peer, std::move(hello));
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
  if (call.executor != nullptr) {
    pacer_->callEnded();
  }
  call.executor.reset();
  call.request = {};  // the tensors are free before anybody is told
  if (call.handle->isDetached()) {
    const std::lock_guard lock(mutex_);
    detached_.erase(call.handle);
  }
  call.handle->complete(failure);
}

void ReshardService::fail(const CallKey& key, const Failure& failure, bool tell) {
  const auto found = calls_.find(key);
  if (found == calls_.end()) {
    return;
  }
  ActiveCall call = std::move(found->second);
  calls_.erase(found);
  remember(key, failure);
  network_->cancelTimer(call.timer);
  if (call.executor != nullptr) {
    call.executor->cancel();
  }
  if (tell) {
    for (const int32_t peer : call.request.prepared->participant_peers) {
      if (peer != options_.group_rank && !lost_.contains(peer)) {
        network_->sendControl(peer, encode(FailNotice{key, failure}));
      }
    }
  }
  failWithWatch(key, call, failure);
  end(call, failure);
}

bool ReshardService::joinWatch(const CallKey& key, ActiveCall& call) {
  if (!call.request.watch.has_value()) {
    return true;
  }
  const CallKey watch = *call.request.watch;
  if (const auto found = calls_.find(watch); found != calls_.end()) {
    found->second.watched.insert(key);
    return true;
  }
  const auto failed = failed_.find(watch);
  fail(key, failed != failed_.end() ? failed->second : Failure{FailureKind::kGroup, callText(key, call) + ": what it belongs to is closed", {}},
       false);
  return false;
}

/// A call takes its watch along, a watch all its calls.
void ReshardService::failWithWatch(const CallKey& key, const ActiveCall& call, const Failure& failure) {
  if (call.request.watch.has_value()) {
    if (const auto watch = calls_.find(*call.request.watch); watch != calls_.end()) {
      watch->second.watched.erase(key);
      fail(*call.request.watch, failure, true);
    }
  }
  for (const CallKey& watched : call.watched) {
    fail(watched, failure, false);
  }
}

void ReshardService::takeFailNotice(int32_t peer, FailNotice notice) {
  if (notice.failure.kind == FailureKind::kPeer) {
    peer_failures_[peer] = notice.failure;
  }
  if (calls_.contains(notice.key)) {
    fail(notice.key, notice.failure, true);  // passed on, so that nobody hears this rank's goodbye before the reason
  } else if (!isPast(notice.key) && early_.size() < kMaxEarlyCalls) {
    early_[notice.key].failure = std::move(notice.failure);
  }
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
      network_->sendControl(peer, encode(answerTo(decodeQuestion(message))));
      return;
    case ControlKind::kAnswer:
      takeAnswer(peer, decodeAnswer(message));
      return;
  }
}

void ReshardService::onPeerLost(int32_t peer, const std::string& reason, bool is_goodbye) {
  LostPeer lost{is_goodbye ? "it has left the group" : reason, {globalRank(peer)}};
  if (const auto told = peer_failures_.find(peer); is_goodbye && told != peer_failures_.end()) {
    lost.reason += " after this: " + told->second.text;
    lost.blamed_ranks = told->second.blamed_ranks;
  }
  lost_.emplace(peer, lost);
  std::vector<CallKey> hit;
  for (const auto& [key, call] : calls_) {
    if (needs(call, peer, is_goodbye)) {
      hit.push_back(key);
    }
  }
  // Watches last: what fails first names the tensor.
  std::stable_partition(hit.begin(), hit.end(), [this](const CallKey& key) { return !calls_.at(key).request.is_watch; });
  for (const CallKey& key : hit) {
    if (const auto found = calls_.find(key); found != calls_.end()) {
      fail(key,
           {FailureKind::kPeer,
            callText(key, found->second) + ": rank " + std::to_string(globalRank(peer)) + " is lost (" + lost.reason + "); " +
                progressOf(found->second),
            lost.blamed_ranks},
           true);
    }
  }
}

std::string ReshardService::progressOf(const ActiveCall& call) {
  if (call.executor != nullptr) {
    return call.executor->describeProgress();
  }
  return call.request.is_watch && call.request.describe ? call.request.describe() : "has just started";
}

bool ReshardService::needs(const ActiveCall& call, int32_t peer, bool is_goodbye) const {
  const std::vector<int32_t>& peers = call.request.prepared->participant_peers;
  if (std::find(peers.begin(), peers.end(), peer) == peers.end()) {
    return false;
  }
  if (call.request.is_watch) {
    return !is_goodbye;  // a rank that has done its part may leave
  }
  for (int round = call.rounds_done; round < call.num_rounds; ++round) {
    if (neighbour(*call.request.prepared, -(int64_t{1} << round)) == peer && !call.hellos.contains(static_cast<uint8_t>(round))) {
      return true;
    }
  }
  if (call.executor == nullptr) {
    return false;
  }
  const std::vector<int64_t> waiting = call.executor->waitingFor();
  return std::find(waiting.begin(), waiting.end(), globalRank(peer)) != waiting.end();
}

void ReshardService::askAround(const CallKey& key) {
  const auto found = calls_.find(key);
  if (found == calls_.end()) {
    return;
  }
  ActiveCall& call = found->second;
  if (call.is_asking) {
    return;
  }
  call.is_asking = true;
  for (const int32_t peer : call.request.prepared->participant_peers) {
    if (peer != options_.group_rank) {
      network_->sendControl(peer, encode(Question{key}));
    }
  }
  call.timer = network_->startTimer(kAnswerTime, [this, key] { concludeTimeout(key); });
}

Answer ReshardService::answerTo(const Question& question) const {
  const auto found = calls_.find(question.key);
  if (found != calls_.end()) {
    return {question.key, true, (found->second.request.is_watch ? "" : "is in this call: ") + progressOf(found->second)};
  }
  const std::string last = last_call_.empty() ? "has called no reshard yet" : "last called " + last_call_;
  return isPast(question.key) ? Answer{question.key, true, "has ended this call; " + last}
                              : Answer{question.key, false, "has not made this call; it " + last};
}

void ReshardService::takeAnswer(int32_t peer, Answer answer) {
  const CallKey key = answer.key;
  const auto found = calls_.find(key);
  if (found == calls_.end() || !found->second.is_asking) {
    return;
  }
  ActiveCall& call = found->second;
  call.answers[peer] = std::move(answer);
  if (call.answers.size() + 1 == call.request.prepared->participant_peers.size()) {
    network_->cancelTimer(call.timer);
    concludeTimeout(key);
  }
}

void ReshardService::concludeTimeout(const CallKey& key) {
  const auto found = calls_.find(key);
  if (found == calls_.end()) {
    return;
  }
  const ActiveCall& call = found->second;
  std::vector<int64_t> silent;
  std::vector<int64_t> absent;
  std::string lines;
  for (const int32_t peer : call.request.prepared->participant_peers) {
    if (peer == options_.group_rank) {
      continue;
    }
    const auto answer = call.answers.find(peer);
    const bool is_silent = answer == call.answers.end();
    if (is_silent) {
      silent.push_back(globalRank(peer));
    } else if (!answer->second.has_called) {
      absent.push_back(globalRank(peer));
    }
    lines +=
        "\n  rank " + std::to_string(globalRank(peer)) + (is_silent ? " does not answer (stopped, hung or cut off)" : " " + answer->second.state);
  }
  const std::vector<int64_t>& blamed = silent.empty() ? absent : silent;
  std::string head = callText(key, call) + (call.request.is_watch ? " does not get on: a wait took longer than " : " did not end within ") +
                     std::to_string(call.request.timeout.count()) + " ms";
  if (!blamed.empty()) {
    head += silent.empty() ? ": not called by rank " : ": no answer from rank ";
    head += rankList(blamed);
  }
  fail(key, {FailureKind::kPeer, head + "; here: " + progressOf(call) + "; the others:" + lines, blamed}, true);
}

bool ReshardService::isPast(const CallKey& key) const {
  if (key.lane != 0) {
    return failed_.contains(key);
  }
  const auto started = started_.find(key.participants);
  return started != started_.end() && key.count < started->second;
}

void ReshardService::remember(const CallKey& key, const Failure& failure) {
  if (!failed_.emplace(key, failure).second) {
    return;
  }
  failed_order_.push_back(key);
  if (failed_order_.size() > kMaxFailed) {
    failed_.erase(failed_order_.front());
    failed_order_.pop_front();
  }
}

std::string ReshardService::callText(const CallKey& key, const ActiveCall& call) const {
  const PreparedPlan& prepared = *call.request.prepared;
  if (call.request.key.has_value()) {
    return "on rank " + std::to_string(globalRank(options_.group_rank)) + ", " +
           (call.request.describe && !call.request.is_watch ? call.request.describe() : prepared.summary);
  }
  return "on rank " + std::to_string(globalRank(options_.group_rank)) + ", " +
         (key.lane == 0 ? "reshard call " + std::to_string(key.count) : "backward of a reshard") + " of ranks " + rankList(prepared.participants) +
         " (" + prepared.summary + ")";
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
      call.executor->transportGone();
    }
  }
  for (auto& [key, call] : calls_) {
    call.handle->complete(Failure{FailureKind::kGroup, callText(key, call) + ": the process group was closed while it was in flight", {}});
  }
  calls_.clear();
}

}  // namespace xmesh::runtime
