#include "c10d/stream/device_lines.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <chrono>
#include <utility>

#include "c10d/stream/device_kernels.h"

namespace xmesh::c10d_backend {
namespace {

constexpr std::chrono::seconds kEndPatience{5};

}  // namespace

std::unique_ptr<runtime::Executors> DeviceLines::executors(const runtime::Route& route, runtime::StreamExecutors::Post network) {
  const c10::Device device(static_cast<c10::DeviceType>(route.device_kind), static_cast<c10::DeviceIndex>(route.device_index));
  Line made;
  made.use = std::make_unique<LineUse>(device);
  const std::shared_ptr<DeviceLine>& line = made.use->line();
  const std::string prefix = c10::DeviceTypeName(device.type(), /*lower_case=*/true) + "/";
  made.communicators = std::make_shared<BackendCommunicators>(
      line, threads_, [make = make_inner_, device, prefix](const std::string& name, int rank, const std::vector<int64_t>& global_ranks) {
        return make(device, prefix + name, rank, global_ranks);
      });
  const auto allocate = [device](int64_t num_bytes) {
    // As an empty tensor would: on the line's stream, behind whose use of it the memory is free again.
    auto memory = std::make_shared<at::DataPtr>(c10::GetAllocator(device.type())->allocate(static_cast<size_t>(num_bytes)));
    return std::shared_ptr<void>(memory, memory->get());
  };
  const auto on_line = [line](std::function<void()> task) { line->post(std::move(task)); };
  auto out =
      std::make_unique<runtime::StreamExecutors>(runtime::StreamExecutors::Line{made.communicators, kernelsOf(device), made.use->order(), group_},
                                                 allocate, runtime::StreamExecutors::Threads{std::move(network), on_line});
  const std::lock_guard lock(mutex_);
  lines_.emplace(route, std::move(made));
  return out;
}

MirrorLines DeviceLines::mirrorLines(c10::Device device) {
  const std::lock_guard lock(mutex_);
  auto found = mirror_lines_.find(device.type());
  if (found == mirror_lines_.end()) {
    found = mirror_lines_.emplace(device.type(), MirrorLines{std::make_shared<DeviceLine>(device), std::make_shared<DeviceLine>(device)}).first;
  }
  return found->second;
}

void DeviceLines::close() noexcept {
  std::map<runtime::Route, Line> lines;
  std::map<c10::DeviceType, MirrorLines> mirror_lines;
  {
    const std::lock_guard lock(mutex_);
    lines = std::exchange(lines_, {});
    mirror_lines = mirror_lines_;
  }
  for (auto& [type, copies] : mirror_lines) {
    copies.to_host->close();
    copies.from_host->close();
  }
  for (auto& [route, line] : lines) {
    if (line.communicators->abortAll({"the process group was closed", -1}) && line.use->isShared()) {
      line.use->line()->waitPassed();
    }
    line.use.reset();
  }
  threads_->ending.waitFor(kEndPatience);
}

}  // namespace xmesh::c10d_backend
