#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/executor.h"

namespace xmesh::c10d_backend {

/// The names of two kinds of device, as numbers. Throws for what is none.
runtime::DeviceKinds kindsOf(const std::pair<std::string, std::string>& names);

/// A tensor's memory as the service takes it.
runtime::LocalTensor plainMemoryOf(const at::Tensor& tensor);

/// The device that tensors of a call are on here; nothing where all are on the host. Throws ValueError where they are on several.
std::optional<c10::Device> deviceOf(const runtime::PreparedPlan& prepared, const std::vector<at::Tensor>& src, const std::vector<at::Tensor>& dst);

/// Tensors as the service takes them: their memory without the tensors, one entry per tensor of the plan. Throws ValueError for one on another kind
/// of device than its plan says, and what Program::checkLocalTensors throws.
runtime::Movement movementOf(const std::shared_ptr<const runtime::PreparedPlan>& prepared, const std::vector<at::Tensor>& src,
                             const std::vector<at::Tensor>& dst);

}  // namespace xmesh::c10d_backend
