#include "c10d/watched_transfers.h"

#include <optional>
#include <utility>

namespace xmesh::c10d_backend {

WatchedTransfers::WatchedTransfers(std::shared_ptr<Endpoint> endpoint, Options options)
    : endpoint_(std::move(endpoint)), options_(std::move(options)), participants_(runtime::hashRanks(options_.ranks)) {
  runtime::WatchRequest request;
  request.terms = endpoint_->terms(options_.ranks, {}, options_.name);
  request.key = options_.watch;
  request.pipeline = options_.pipeline;
  request.timeout = endpoint_->timeout();
  request.describe = [description = description_, at_first = options_.at_first] {
    const std::lock_guard lock(description->mutex);
    return description->describe ? description->describe() : at_first;
  };
  watch_ = endpoint_->service().watch(std::move(request));
}

void WatchedTransfers::describeBy(std::function<std::string()> describe) {
  if (!fork_.isHere()) {
    return;  // nobody asks, and who held the lock at the fork is not here to give it back
  }
  const std::lock_guard lock(description_->mutex);
  description_->describe = std::move(describe);
}

void WatchedTransfers::meet(const runtime::CallFields& fields) {
  runtime::MeetingRequest request;
  request.terms = endpoint_->terms(options_.ranks, fields, options_.name);
  request.key = runtime::CallKey{participants_, runtime::hashBytes(options_.name + "/meeting") | 1U, num_meetings_++};
  request.watch = watch_->key();
  request.timeout = endpoint_->timeout();
  endpoint_->service().meet(std::move(request))->wait();
}

WatchedTransfers::Lane WatchedTransfers::lane(const std::string& name) {
  auto known = lanes_.find(name);
  if (known == lanes_.end()) {
    known = lanes_.emplace(name, Lane{runtime::hashBytes(options_.name + "/" + name) | 1U}).first;
  }
  return known->second;
}

WatchedTransfer WatchedTransfers::begin(Lane lane, uint64_t count, const Prepared& prepared, const std::vector<at::Tensor>& src,
                                        const std::vector<at::Tensor>& dst, std::function<std::string()> what) {
  CallMovement moving = endpoint_->movements().of(prepared, src, dst);
  runtime::TransferRequest request;
  request.movement = std::move(moving.movement);
  request.key = runtime::CallKey{participants_, lane.key, count};
  request.watch = watch_->key();
  request.phase = phase_;
  request.describe = std::move(what);
  return {endpoint_->service().transfer(std::move(request)), std::move(moving.on_device)};
}

void WatchedTransfers::waitWithin(const WatchedTransfer& transfer, std::chrono::milliseconds timeout) {
  const auto has_come = [&transfer](std::chrono::milliseconds limit) {
    return transfer.on_device != nullptr ? transfer.call->waitEnqueued(limit) : transfer.call->wait(limit);
  };
  if (!has_come(timeout)) {
    suspect();
    has_come(std::chrono::milliseconds(0));
  }
  if (transfer.on_device != nullptr) {
    transfer.on_device->orderCurrentStream();
  }
}

void WatchedTransfers::check() const {
  if (const std::optional<runtime::Failure> failure = watch_->failure()) {
    runtime::throwFailure(*failure);
  }
}

void WatchedTransfers::close(const std::string& farewell) {
  if (!std::exchange(is_closed_, true) && fork_.isHere()) {
    std::optional<runtime::Failure> said;
    if (!farewell.empty()) {
      said = runtime::Failure{runtime::FailureKind::kPeer, farewell, {endpoint_->globalRank()}, -1, -1, phase_ + 1};
    }
    endpoint_->service().release(watch_->key(), said);
  }
}

}  // namespace xmesh::c10d_backend
