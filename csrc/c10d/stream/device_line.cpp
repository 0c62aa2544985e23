#include "c10d/stream/device_line.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/thread_name.h>

#include <chrono>
#include <utility>

namespace xmesh::c10d_backend {
namespace {

constexpr std::chrono::microseconds kLookEvery{200};  ///< at what the stream has passed, while somebody waits for it
constexpr std::chrono::milliseconds kPatience{3'000};

}  // namespace

DeviceLine::DeviceLine(c10::Device device) : device_(device), thread_([this] { run(); }) {}

DeviceLine::~DeviceLine() { close(); }

void DeviceLine::post(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_) {
      return;
    }
    tasks_.push_back(std::move(task));
  }
  woken_.notify_one();
}

void DeviceLine::whenPassed(std::function<void()> told) {
  c10::Event event(device_.type());
  event.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  marks_.push_back({std::move(event), std::move(told)});
}

void DeviceLine::tellPassed() {
  while (!marks_.empty() && marks_.front().event.query()) {
    const Mark mark = std::move(marks_.front());
    marks_.pop_front();
    mark.told();
  }
}

void DeviceLine::run() {
  c10::setThreadName("xmesh_stream");
  at::init_num_threads();
  const c10::impl::VirtualGuardImpl impl(device_.type());
  const c10::DeviceGuard on_device(device_);
  const c10::StreamGuard on_stream(impl.getNewStream(device_));
  const at::NoGradGuard no_gradients;
  std::unique_lock lock(mutex_);
  while (!is_closed_) {
    const auto has_work = [this] { return is_closed_ || !tasks_.empty(); };
    if (marks_.empty()) {
      woken_.wait(lock, has_work);
    } else {
      woken_.wait_for(lock, kLookEvery, has_work);
    }
    std::deque<std::function<void()>> tasks = std::exchange(tasks_, {});
    lock.unlock();
    for (const std::function<void()>& task : tasks) {
      task();
    }
    tasks.clear();
    tellPassed();
    lock.lock();
  }
  lock.unlock();
  for (const auto begin = std::chrono::steady_clock::now(); !marks_.empty() && std::chrono::steady_clock::now() < begin + kPatience;) {
    tellPassed();
    std::this_thread::sleep_for(kLookEvery);
  }
  if (!marks_.empty()) {
    new std::deque<Mark>(std::move(marks_));  // NOLINT(bugprone-unused-raii): see close()
  }
}

void DeviceLine::close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
  }
  woken_.notify_one();
  if (thread_.joinable()) {
    thread_.join();
  }
}

}  // namespace xmesh::c10d_backend
