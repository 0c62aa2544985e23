#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/agreement/arrivals.h"
#include "runtime/agreement/call_history.h"
#include "runtime/agreement/mailbox.h"
#include "runtime/agreement/peers.h"
#include "runtime/agreement/refusals.h"
#include "runtime/calls/calls.h"
#include "runtime/calls/requests.h"
#include "runtime/calls/reshard_call.h"
#include "runtime/executors_by_route.h"
#include "transport/control_network.h"

namespace xmesh::runtime {

/// Runs the reshards of one rank of one group. It hands what its callers ask for, and what the other ranks say, to those who know: Calls (what is in
/// flight), Refusals (numbers calls, and those that are refused), Arrivals (how pipelines begin).
///
/// A watch ties many calls together: it stands for all ranks that work on something, e.g. a pipeline. It fails on every one of its participants when
/// one of them dies, when one calls failCall() on it, or when a call that names it fails; with it fail all calls that name it, so that no rank waits
/// for a call that will not be made. A rank that refuses its part in one phase has done its part in those before: the failure waits for the others to
/// come to that phase (Failure::phase). Before they share the watch of a pipeline its ranks arrive: it fails where one of them, which has not arrived
/// there, waits for this one elsewhere, could not make a pipeline, or leaves.
///
/// Threading: requests, flush(), refusals and close() come from one thread at a time; what says so from any; everything else happens on the network's
/// thread. The networks are made by `make_networks` (they need the service as their PeerEvents); the control network dies in close().
class ReshardService final : public transport::PeerEvents {
 public:
  struct Options {
    RankNumbers numbers;
    int32_t group_rank = 0;  ///< this rank's peer number
  };
  /// What carries the ranks' messages, and what moves the tensors.
  struct Networks {
    std::unique_ptr<transport::ControlNetwork> control;
    std::unique_ptr<ExecutorsByRoute> executors;  ///< may use `control`
    std::string address;                          ///< where the others reach this rank
  };
  using MakeNetworks = std::function<Networks(transport::PeerEvents&)>;

  ReshardService(Options options, const MakeNetworks& make_networks);
  ~ReshardService() override;
  ReshardService(const ReshardService&) = delete;
  ReshardService& operator=(const ReshardService&) = delete;

  int64_t peakStagingBytes() const { return executors_->peakStagingBytes(); }

  transport::ControlNetwork& network() { return *network_; }
  const std::string& address() const { return address_; }
  /// Runs `task` on the network's thread; false, and nothing happens, once closed. Any thread.
  bool post(std::function<void(transport::ControlNetwork& network)> task) {
    return mailbox_.post([this, task = std::move(task)] { task(*network_); });
  }
  /// Says where a peer listens. Throws GroupError when closed. Any thread.
  void setAddress(int32_t peer, const std::string& address);

  /// Each starts a call, whose participants' addresses must be known; a transfer only with flush() or the next call that is none. Throws GroupError
  /// when closed.
  std::shared_ptr<ReshardCall> reshard(ReshardRequest request);
  std::shared_ptr<ReshardCall> transfer(TransferRequest request);
  std::shared_ptr<ReshardCall> meet(MeetingRequest request);
  std::shared_ptr<ReshardCall> watch(WatchRequest request);
  /// Starts the transfers that were held: all of them wake the network's thread once.
  void flush();
  /// Fails a call of this rank's, and tells its participants. No-op once it has ended. Any thread.
  void failCall(const CallKey& key, Failure failure);
  /// Asks the participants of a call what they do about it; it fails with what they say as it does at its timeout. Any thread.
  void suspect(const CallKey& key);
  /// Ends a watch in peace; the others get `farewell` once they come to its phase. Any thread.
  void release(const CallKey& watch, std::optional<Failure> farewell = std::nullopt);

  Refusals& refusals() { return refusals_; }
  Arrivals& arrivals() { return arrivals_; }
  /// Waits for the detached calls and those on a device (`drain` at most), fails the others with GroupError, says goodbye and joins the network's
  /// thread. Idempotent.
  /// Not to be called in a forked child, which has no such thread: leak the service there.
  void close(std::chrono::milliseconds drain) noexcept;

  void onControl(int32_t peer, std::string message) override;
  void onPeerLost(int32_t peer, const std::string& reason, bool is_goodbye) override;

 private:
  std::shared_ptr<ReshardCall> begin(Call call, bool is_detached = false);
  /// Posts the start of the held calls; with mutex_.
  void postHeld();
  void startBegun(size_t num_calls);

  Mailbox mailbox_;
  Peers peers_;
  CallHistory history_;
  Refusals refusals_;
  Arrivals arrivals_;
  Calls calls_;

  std::mutex mutex_;  ///< guards the three below
  std::map<const ReshardCall*, std::shared_ptr<ReshardCall>> detached_;
  std::deque<Call> begun_;  ///< not yet started on the network's thread
  size_t num_held_ = 0;     ///< the last of them, whose start is not posted

  std::string address_;
  std::unique_ptr<transport::ControlNetwork> network_;
  std::unique_ptr<ExecutorsByRoute> executors_;
};

}  // namespace xmesh::runtime
