#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/host/staging_use.h"
#include "runtime/memory/box_copy.h"
#include "runtime/program/program.h"

namespace xmesh::runtime {

/// The reductions of a program: their accumulators, and how far each has come. Contributions are taken in their order, whenever they arrive.
/// Threading: the transport's thread. `program`, `boxes` (by slice box) and `staging` outlive it.
class HostReductions {
 public:
  HostReductions(const Program& program, const std::vector<StridedBox>& boxes, StagingUse& staging);

  /// Makes sure that a reduction has an accumulator; that of a partial sum is staged until it has been sent. False when there is no memory now.
  bool prepare(int32_t reduction);
  /// Where a reduction adds up; null before prepare().
  std::byte* accumulator(int32_t reduction) const { return states_[static_cast<size_t>(reduction)].accumulator; }
  /// A contribution has arrived, in the accumulator itself or in `staged` (by receive; empty where nothing is staged): takes in what has its turn,
  /// and gives its memory back. True when that was all and the sum is where it belongs.
  bool take(int32_t receive, std::vector<StagingBuffer>& staged);
  /// A partial sum has been sent.
  void release(int32_t reduction) { staging_.release(states_[static_cast<size_t>(reduction)].staged); }
  void releaseAll();

 private:
  struct State {
    std::byte* accumulator = nullptr;  ///< in the destination, or staged
    StagingBuffer staged;              ///< has a partial sum until it is sent
    int32_t num_received = 0;          ///< received contributions taken in so far
    bool is_own_done = false;
  };

  void takeOwn(const ReduceStep& step, State& state) const;
  void finish(const ReduceStep& step, State& state);
  const StridedBox& boxOf(int32_t box) const { return boxes_[static_cast<size_t>(box)]; }

  const Program& program_;
  const std::vector<StridedBox>& boxes_;
  StagingUse& staging_;
  std::vector<State> states_;
  std::vector<uint8_t> has_arrived_;  ///< by receive; empty when nothing is reduced
};

}  // namespace xmesh::runtime
