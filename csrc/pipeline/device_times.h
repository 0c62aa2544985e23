#pragma once

#include <c10/core/Event.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>

#include "core/pipeline/action.h"

namespace xmesh::pipeline {

/// When a device's stream was at an action: steady clock, nanoseconds.
struct DeviceSpan {
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

/// The times of a step's actions on devices, by two events around what each enqueues. Threading: the engine's thread.
class DeviceTimes {
 public:
  void beginStep();
  /// What the current stream of `device` gets from now on is the action's, until ends().
  void begins(const core::Action& action, c10::Device device);
  void ends();
  /// Whether the device has yet to pass the last one.
  bool isBusy() const { return used_ > 0 && !marks_.at(used_ - 1).end.query(); }
  /// Of a step that has ended; waits for the devices. Empty where one of them measures no times.
  const std::map<core::Action, DeviceSpan>& spans() const;

 private:
  struct Marks {
    explicit Marks(c10::DeviceType type) : begin(type, c10::EventFlag::BACKEND_DEFAULT), end(type, c10::EventFlag::BACKEND_DEFAULT) {}
    c10::Event begin;
    c10::Event end;
    core::Action action;
    c10::Device device = c10::kCPU;
  };
  /// One action's, or the next free ones.
  Marks& next(c10::DeviceType type);
  std::map<core::Action, DeviceSpan> read() const;

  std::deque<Marks> marks_;  ///< the first used_ are of this step
  size_t used_ = 0;
  mutable std::optional<std::map<core::Action, DeviceSpan>> spans_;  ///< once they are asked for
};

}  // namespace xmesh::pipeline
