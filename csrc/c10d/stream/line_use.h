#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "c10d/stream/device_line.h"
#include "runtime/stream/call_order.h"

namespace xmesh::c10d_backend {

/// A group's use of a device's line. A process has one line per device, with one order of calls, for all of its groups: NCCL wants the operations of
/// all communicators of a device from one thread, in one order on all ranks. The line is closed with its last use. No two ranks of a process can
/// share a device: they would wait for each other on one thread. Threading: any thread but the line's.
class LineUse {
 public:
  /// Waits while the device's line before is closed. Throws where the device has no stream to give.
  explicit LineUse(c10::Device device);
  ~LineUse();
  LineUse(const LineUse&) = delete;
  LineUse& operator=(const LineUse&) = delete;

  const std::shared_ptr<DeviceLine>& line() const { return line_; }
  const std::shared_ptr<runtime::CallOrder>& order() const { return order_; }
  /// Whether other groups use the line now: then the end of this use closes nothing.
  bool isShared() const;

 private:
  const c10::Device device_;
  std::shared_ptr<DeviceLine> line_;
  std::shared_ptr<runtime::CallOrder> order_;
};

}  // namespace xmesh::c10d_backend
