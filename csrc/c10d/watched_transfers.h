#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "c10d/endpoint.h"
#include "runtime/fork_mark.h"

namespace xmesh::c10d_backend {

/// A transfer that has been begun.
struct WatchedTransfer {
  std::shared_ptr<runtime::ReshardCall> call;
  /// Null: what comes is there for the host when the call has ended. Else it is there for streams that go on behind the call.
  std::shared_ptr<CallOnDevice> on_device;

  /// Whether WatchedTransfers::wait() returns at once.
  bool hasArrived() const { return on_device != nullptr ? call->isEnqueued() : call->isCompleted(); }
};

/// Numbered transfers among ranks that have agreed on them already: no transfer is compared. All are tied to one watch: a rank that fails, is lost or
/// refuses ends them on all of its ranks. They come in phases, which all ranks number alike: see runtime::Watch.
/// Threading: one thread; fail() and hasFailed() on any. No method needs the GIL.
class WatchedTransfers {
 public:
  using Prepared = std::shared_ptr<const runtime::PreparedPlan>;
  /// Transfers that are numbered together.
  struct Lane {
    uint64_t key = 0;
  };
  struct Options {
    std::vector<int64_t> ranks;  ///< ascending global ranks, whose addresses are known; this one among them
    std::string name;            ///< for error texts; alike on all ranks, another for every watch of the endpoint
    runtime::CallKey watch;      ///< alike on all ranks, never used again
    uint64_t pipeline = 0;       ///< see runtime::WatchRequest
    std::string at_first;        ///< what this rank does until describeBy(): "is making the pipeline"
  };

  WatchedTransfers(std::shared_ptr<Endpoint> endpoint, Options options);
  ~WatchedTransfers() { close({}); }
  WatchedTransfers(const WatchedTransfers&) = delete;
  WatchedTransfers& operator=(const WatchedTransfers&) = delete;

  /// From now on `describe` says what this rank does, for the error texts of other ranks; it is called on the network's thread until close().
  void describeBy(std::function<std::string()> describe);
  /// Waits until every rank is here with equal fields; a difference is a ValueError on all, which names the field.
  void meet(const runtime::CallFields& fields);
  /// The lane of that name: equal on all ranks, another for every name.
  Lane lane(const std::string& name);
  /// The transfers from now on are of the next phase, the same on all ranks: a phase is one thing that all of them do together.
  void beginPhase() { ++phase_; }
  uint64_t phase() const { return phase_; }
  /// Transfer number `count` of a lane, which starts with the next flush(); `what` tells for error texts what it carries.
  WatchedTransfer begin(Lane lane, uint64_t count, const Prepared& prepared, const std::vector<at::Tensor>& src, const std::vector<at::Tensor>& dst,
                        std::function<std::string()> what);
  /// Starts the transfers begun since the last time; together they wake the network's thread once.
  void flush() { endpoint_->service().flush(); }
  /// Waits for a transfer, at most the endpoint's timeout; then all ranks are asked and the watch fails. Throws what the transfer failed with. Of one
  /// that receives on a device it waits until the stream has it, behind which the current stream goes on.
  void wait(const WatchedTransfer& transfer) { waitWithin(transfer, endpoint_->timeout()); }
  void waitWithin(const WatchedTransfer& transfer, std::chrono::milliseconds timeout);
  /// Throws what the watch has failed with, if it has.
  void check() const;
  bool hasFailed() const { return watch_->failure().has_value(); }
  /// All ranks are asked what they do; the watch fails with what they say.
  void suspect() { endpoint_->service().suspect(watch_->key()); }
  /// The watch, whose end is its failure or this rank's close().
  runtime::ReshardCall& watch() const { return *watch_; }
  /// Ends the watch on every rank.
  void fail(runtime::Failure failure) { endpoint_->service().failCall(watch_->key(), std::move(failure)); }
  /// Ends it with a ValueError: on the others once they come to this rank's phase.
  void refuse(std::string text) { fail({runtime::FailureKind::kMistake, std::move(text), {}, -1, -1, phase_}); }
  const std::shared_ptr<Endpoint>& endpoint() const { return endpoint_; }
  const std::string& name() const { return options_.name; }
  /// Ends the watch here; the others get a PeerError with `farewell` in their next phase, if there is one. Idempotent.
  void close(const std::string& farewell);

 private:
  struct Description {
    std::mutex mutex;
    std::function<std::string()> describe;
  };

  const std::shared_ptr<Endpoint> endpoint_;
  const Options options_;
  const uint64_t participants_;
  std::map<std::string, Lane> lanes_;
  const std::shared_ptr<Description> description_ = std::make_shared<Description>();
  std::shared_ptr<runtime::ReshardCall> watch_;
  uint64_t phase_ = 0;
  uint64_t num_meetings_ = 0;
  const runtime::ForkMark fork_;
  bool is_closed_ = false;
};

}  // namespace xmesh::c10d_backend
