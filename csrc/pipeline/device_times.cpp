#include "pipeline/device_times.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <cmath>
#include <exception>
#include <utility>

#include "runtime/pipeline/engine.h"

namespace xmesh::pipeline {
namespace {

c10::Stream currentStream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

int64_t nanosecondsBetween(const c10::Event& first, const c10::Event& second) { return std::llround(1e6 * first.elapsedTime(second)); }

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
        c10::Event now(marks.device.type(), c10::EventFlag::BACKEND_DEFAULT);
        now.record(currentStream(marks.device));
        now.synchronize();
        const int64_t now_ns = runtime::steadyNanoseconds();
        start = starts.emplace(marks.device.type(), std::pair(&marks.begin, now_ns - nanosecondsBetween(marks.begin, now))).first;
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
