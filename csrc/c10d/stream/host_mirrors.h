#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "c10d/stream/call_on_device.h"
#include "c10d/stream/device_lines.h"
#include "runtime/executor.h"

namespace xmesh::c10d_backend {

/// The mirrors of one call: host memory for each of its tensors that is on the device, copied on the lines' streams. It keeps both until the streams
/// have passed their copies. Threading: made, and given its tensors, by the caller's thread.
class HostMirrors final : public runtime::Mirrors, public std::enable_shared_from_this<HostMirrors> {
 public:
  HostMirrors(MirrorLines lines, std::shared_ptr<CallOnDevice> call) : lines_(std::move(lines)), call_(std::move(call)) {}

  /// Puts mirrors into the movement of these tensors, in the places of those on the device.
  void standIn(runtime::Movement& movement, const std::vector<at::Tensor>& src, const std::vector<at::Tensor>& dst);
  /// Whether anything is copied to the device.
  bool hasDestinations() const { return !destinations_.empty(); }
  void fetch(Told told) override;
  void store(std::function<void()> enqueued, Told told) override;
  void giveUp() noexcept override { is_given_up_ = true; }

 private:
  struct Pair {
    at::Tensor host;
    at::Tensor device;
  };
  static runtime::LocalTensor mirror(std::vector<Pair>& pairs, const at::Tensor& tensor);
  /// Runs `copy` on a line, behind what the caller had enqueued, and tells once the stream has passed it.
  void onLine(const std::shared_ptr<DeviceLine>& line, std::function<void()> copy, Told told);

  const MirrorLines lines_;
  const std::shared_ptr<CallOnDevice> call_;
  std::vector<Pair> sources_;
  std::vector<Pair> destinations_;
  std::atomic<bool> is_given_up_ = false;
};

}  // namespace xmesh::c10d_backend
