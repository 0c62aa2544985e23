#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/resharding/plan.h"
#include "transport/host_transport.h"

namespace xmesh::runtime {

/// (global rank, bytes per second): how fast a rank sends to each peer on another host if all pairs are to end when the busiest NIC does: pair's
/// bytes / that NIC's seconds. TCP gives equal shares to unequal demands; paced, each pair gets the share it was planned. Only for plans whose pairs
/// all move at once (striped, send_recv), and only where link rates are measured and pairs of one NIC differ. Not for plans that relay between hosts:
/// there a late chunk must be free to catch up. Pairs below 1/32 of the NIC's rate are left alone.
std::vector<std::pair<int64_t, int64_t>> pacingRates(const core::ReshardingPlan& plan, int64_t global_rank);

/// Applies the rates of the one call in flight; with several in flight nobody is paced, since their plans do not know of each other.
/// Threading: the transport's thread.
class Pacer {
 public:
  /// (group rank, bytes per second)
  using Rates = std::vector<std::pair<int32_t, int64_t>>;

  explicit Pacer(transport::HostTransport& transport) : transport_(transport) {}
  /// `rates` must stay until the matching callEnded.
  void callStarted(const Rates& rates);
  void callEnded();
  /// The transport is gone: nobody is paced any more.
  void abandon() { is_abandoned_ = true; }

 private:
  void lift();

  transport::HostTransport& transport_;
  bool is_abandoned_ = false;
  int64_t num_calls_ = 0;
  std::vector<int32_t> paced_;
};

}  // namespace xmesh::runtime
