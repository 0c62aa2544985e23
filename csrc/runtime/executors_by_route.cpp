#include "runtime/executors_by_route.h"

#include <algorithm>
#include <string>
#include <utility>

#include "runtime/failure.h"

namespace xmesh::runtime {

Executors& ExecutorsByRoute::at(const Route& route) {
  if (route.device_kind == 0) {
    return *host_;
  }
  if (const auto found = on_devices_.find(route); found != on_devices_.end()) {
    return *found->second;
  }
  if (!make_) {
    throw GroupError("nothing here moves the tensors of device kind " + std::to_string(route.device_kind));
  }
  std::unique_ptr<Executors> made = make_(route);
  made->promise(promised_turn_);
  const std::lock_guard lock(mutex_);
  if (is_disconnected_) {
    throw GroupError("the process group is closed");
  }
  return *on_devices_.emplace(route, std::move(made)).first->second;
}

void ExecutorsByRoute::promise(uint64_t turn) {
  promised_turn_ = std::max(promised_turn_, turn);
  for (const auto& [route, executors] : on_devices_) {
    executors->promise(turn);
  }
}

void ExecutorsByRoute::disconnect() {
  const std::lock_guard lock(mutex_);
  is_disconnected_ = true;
  host_->disconnect();
  for (const auto& [route, executors] : on_devices_) {
    executors->disconnect();
  }
}

void ExecutorsByRoute::abandon() {
  host_->abandon();
  for (const auto& [route, executors] : on_devices_) {
    executors->abandon();
  }
}

int64_t ExecutorsByRoute::peakStagingBytes() const {
  const std::lock_guard lock(mutex_);
  int64_t out = host_->peakStagingBytes();
  for (const auto& [route, executors] : on_devices_) {
    out += executors->peakStagingBytes();
  }
  return out;
}

}  // namespace xmesh::runtime
