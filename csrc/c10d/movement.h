#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "c10d/stream/call_on_device.h"
#include "c10d/stream/device_lines.h"
#include "runtime/executor.h"

namespace xmesh::c10d_backend {

/// The names of two kinds of device, as numbers. Throws for what is none.
runtime::DeviceKinds kindsOf(const std::pair<std::string, std::string>& names);

/// A tensor's memory as the service takes it.
runtime::LocalTensor plainMemoryOf(const at::Tensor& tensor);

/// How the tensors of one call move on this rank.
struct CallMovement {
  runtime::Movement movement;
  /// Null: what comes is there for the host when the call has ended. Else it is there for streams that go on behind the call.
  std::shared_ptr<CallOnDevice> on_device;
};

/// The one way of tensors into calls, reshards and pipelines alike: from host memory, on a device's line, or through mirrors in host memory.
/// Threading: any thread; a call is ordered behind the current stream of the one that makes it.
class Movements {
 public:
  explicit Movements(std::shared_ptr<DeviceLines> lines) : lines_(std::move(lines)) {}
  /// The movement has the tensors' memory without the tensors, one entry per local tensor of the program. Throws ValueError where a tensor is on
  /// another kind of device than its plan says, where some are on several devices or on another one than the group's before, and what
  /// Program::checkLocalTensors throws.
  CallMovement of(const std::shared_ptr<const runtime::PreparedPlan>& prepared, const std::vector<at::Tensor>& src,
                  const std::vector<at::Tensor>& dst);

 private:
  /// Refuses another device of a kind than the first.
  void use(c10::Device device);

  const std::shared_ptr<DeviceLines> lines_;
  std::mutex mutex_;
  std::map<c10::DeviceType, c10::Device> used_devices_;
};

}  // namespace xmesh::c10d_backend
