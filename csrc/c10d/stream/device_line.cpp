#include "c10d/stream/device_line.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Logging.h>
#include <c10/util/thread_name.h>

#include <chrono>
#include <future>
#include <utility>

namespace xmesh::c10d_backend {
namespace {

constexpr std::chrono::microseconds kLookEvery{200};  ///< at what the stream has passed, while somebody waits for it
constexpr std::chrono::milliseconds kPassPatience{3'000};

}  // namespace

DeviceLine::DeviceLine(c10::Device device)
    : state_(std::make_shared<State>(c10::impl::VirtualGuardImpl(device.type()).getNewStream(device))), thread_([state = state_] { state->run(); }) {}

DeviceLine::~DeviceLine() { close(); }

void DeviceLine::post(std::function<void()> task) {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->is_closed) {
      return;
    }
    state_->tasks.push_back(std::move(task));
  }
  state_->woken.notify_one();
}

void DeviceLine::whenPassed(Told told) { state_->mark(std::move(told)); }

void DeviceLine::waitPassed() noexcept {
  try {
    const auto passed = std::make_shared<std::promise<void>>();
    const std::future<void> is_passed = passed->get_future();
    post([state = state_.get(), passed] { state->mark([passed](const std::string* /*error*/) { passed->set_value(); }); });
    is_passed.wait_for(2 * kPassPatience);
  } catch (const std::exception& error) {
    LOG(WARNING) << "xmesh: " << error.what();
  }
}

void DeviceLine::State::mark(Told told) {
  c10::Event event(stream.device_type());
  event.record(stream);
  marks.push_back({std::move(event), std::move(told)});
}

void DeviceLine::State::tellPassed() {
  std::string error;
  const auto has_passed = [&](const Mark& mark) {
    try {
      return mark.event.query();
    } catch (const std::exception& thrown) {
      error = thrown.what();
      return true;
    }
  };
  while (!marks.empty() && has_passed(marks.front())) {
    const Mark mark = std::move(marks.front());
    marks.pop_front();
    mark.told(error.empty() ? nullptr : &error);
  }
}

void DeviceLine::State::run() {
  c10::setThreadName("xmesh_stream");
  at::init_num_threads();
  const c10::DeviceGuard on_device(stream.device());
  const c10::StreamGuard on_stream(stream);
  const at::NoGradGuard no_gradients;
  std::unique_lock lock(mutex);
  while (!is_closed) {
    const auto has_work = [this] { return is_closed || !tasks.empty(); };
    if (marks.empty()) {
      woken.wait(lock, has_work);
    } else {
      woken.wait_for(lock, kLookEvery, has_work);
    }
    std::deque<std::function<void()>> now = std::exchange(tasks, {});
    lock.unlock();
    for (const std::function<void()>& task : now) {
      task();
    }
    now.clear();
    tellPassed();
    lock.lock();
  }
  lock.unlock();
  for (const auto begin = std::chrono::steady_clock::now(); !marks.empty() && std::chrono::steady_clock::now() < begin + kPassPatience;) {
    tellPassed();
    std::this_thread::sleep_for(kLookEvery);
  }
  if (!marks.empty()) {
    new std::deque<Mark>(std::move(marks));  // NOLINT(bugprone-unused-raii): see close()
  }
  lock.lock();
  std::deque<std::function<void()>> never = std::exchange(tasks, {});  // they may hold the line, and so themselves
  lock.unlock();
  never.clear();
  lock.lock();
  has_ended = true;
  ended.notify_all();
}

void DeviceLine::close() noexcept {
  if (!thread_.joinable()) {
    return;
  }
  std::unique_lock lock(state_->mutex);
  state_->is_closed = true;
  state_->woken.notify_one();
  const bool has_ended = state_->ended.wait_for(lock, 2 * kPassPatience, [this] { return state_->has_ended; });
  lock.unlock();
  if (has_ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

}  // namespace xmesh::c10d_backend
