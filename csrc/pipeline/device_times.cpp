#include "pipeline/device_times.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <cmath>
#include <exception>
#include <limits>
#include <utility>

#include "runtime/pipeline/engine.h"

namespace xmesh::pipeline {
namespace {

c10::Stream currentStream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

int64_t nanosecondsBetween(const c10::Event& first, const c10::Event& second) { return std::llround(1e6 * first.elapsedTime(second)); }

// When `event`, which `device` has passed, was on the host's clock. The host sees the device pass another event between two readings
// of its clock; of some such windows the shortest, in which neither was kept waiting, says most.
int64_t hostTime(const c10::Event& event, c10::Device device) {
  constexpr int kNumWindows = 5;
  int64_t shortest = std::numeric_limits<int64_t>::max();
  int64_t out = 0;
  for (int i = 0; i < kNumWindows; ++i) {
    c10::Event now(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    const int64_t before_ns = runtime::steadyNanoseconds();
    now.record(currentStream(device));
    now.synchronize();
    const int64_t after_ns = runtime::steadyNanoseconds();
    if (after_ns - before_ns < shortest) {
      shortest = after_ns - before_ns;
      out = after_ns - nanosecondsBetween(event, now);
    }
  }
  return out;
}

}  // namespace

DeviceTimes::Marks& DeviceTimes::next(c10::DeviceType type) {
  if (used_ == marks_.size()) {
    marks_.emplace_back(type);
  } else if (marks_[used_].begin.device_type() != type) {  // a step of other actions than the last
    marks_[used_] = Marks(type);
  }
  return marks_[used_++];
}

void DeviceTimes::beginStep() {
  used_ = 0;
  spans_.reset();
}

const std::map<core::Action, DeviceSpan>& DeviceTimes::spans() const {
  if (!spans_.has_value()) {
    spans_ = read();
  }
  return *spans_;
}

void DeviceTimes::begins(const core::Action& action, c10::Device device) {
  Marks& marks = next(device.type());
  marks.action = action;
  marks.device = device;
  marks.begin.record(currentStream(device));
}

void DeviceTimes::ends() {
  Marks& marks = marks_.at(used_ - 1);
  marks.end.record(currentStream(marks.device));
}

std::map<core::Action, DeviceSpan> DeviceTimes::read() const {
  std::map<core::Action, DeviceSpan> out;
  try {
    // By device, the first event of the step, and when it was on the host's clock.
    std::map<c10::DeviceType, std::pair<const c10::Event*, int64_t>> starts;
    for (size_t i = 0; i < used_; ++i) {
      const Marks& marks = marks_[i];
      auto start = starts.find(marks.device.type());
      if (start == starts.end()) {
        start = starts.emplace(marks.device.type(), std::pair(&marks.begin, hostTime(marks.begin, marks.device))).first;
      }
      const auto [first, first_ns] = start->second;
      out[marks.action] = {first_ns + nanosecondsBetween(*first, marks.begin), first_ns + nanosecondsBetween(*first, marks.end)};
    }
  } catch (const std::exception&) {
    return {};
  }
  return out;
}

}  // namespace xmesh::pipeline
