#include "runtime.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>
#include <pthread.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <thread>

namespace emu {
namespace {

using namespace std::chrono_literals;

constexpr auto kPoll = 1ms;          // how often a waiting thread looks whether it should stop
constexpr auto kGraceAtExit = 1s;    // what tasks that run get to end at the process's end
constexpr int kLongestStretch = 16;  // tasks in a row that are all delayed, or all not

struct DeviceState {
  std::mutex mutex;
  std::vector<Worker*> workers;
  std::atomic<uint32_t> next_pooled{0};
  std::string error;
};

// Everything global is leaked: threads outlive static destructors.
struct Global {
  std::array<DeviceState, kNumDevices> devices;
  std::mutex delays_mutex;
  DelayOptions delays;
  std::atomic<uint64_t> delays_version{0};
  std::atomic<int64_t> num_expired_gates{0};
  std::atomic<int64_t> num_active{0};
  std::atomic<bool> stopping{false};
  std::atomic<bool> started{false};
  std::atomic<bool> bad_fork{false};
};

Global* makeGlobal() {
  auto* global = new Global;
  for (c10::DeviceIndex device = 0; device < kNumDevices; ++device) {
    for (int id = 0; id <= kPoolSize; ++id) global->devices[device].workers.push_back(new Worker(device, id));
  }
  return global;
}

Global& global() {
  static Global* instance = makeGlobal();
  return *instance;
}

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kNumDevices> current_streams{};

DeviceState& stateOf(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < kNumDevices, "emu: there is no device ", int(device), ", only ", int(kNumDevices), " devices");
  return global().devices[device];
}

// A stream's thread must be asleep when libtorch's static objects go: it is stopped before, and never ends.
void stopAtExit() {
  global().stopping = true;
  const auto deadline = Clock::now() + kGraceAtExit;
  while (global().num_active > 0 && Clock::now() < deadline) std::this_thread::sleep_for(kPoll);
}

[[noreturn]] void sleepForever() {
  while (true) pause();
}

void noteStart() {
  static const bool registered = [] {
    std::atexit(stopAtExit);
    pthread_atfork(nullptr, nullptr, [] { global().bad_fork = global().started.load(); });
    return true;
  }();
  (void)registered;
  global().started = true;
}

}  // namespace

bool isStopping() { return global().stopping; }
bool isInBadFork() { return global().bad_fork; }
int64_t numExpiredGates() { return global().num_expired_gates; }

void Recording::finish() {
  {
    std::lock_guard lock(mutex_);
    finished_at_ = Clock::now();
    done_.store(true, std::memory_order_release);
  }
  done_changed_.notify_all();
}

bool Recording::wait(const std::atomic<bool>* stop, Clock::time_point deadline) const {
  std::unique_lock lock(mutex_);
  while (!isDone()) {
    if (isStopping() || (stop != nullptr && *stop) || Clock::now() >= deadline) return false;
    done_changed_.wait_for(lock, kPoll);
  }
  return true;
}

Clock::time_point Recording::finishedAt() const {
  std::lock_guard lock(mutex_);
  return finished_at_;
}

void Gate::release() {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(!expired_, "emu: the gate had opened by itself after ", max_ms_, " ms, before it was released");
  released_ = true;
  changed_.notify_all();
}

bool Gate::isExpired() const {
  std::lock_guard lock(mutex_);
  return expired_;
}

bool Gate::waitUntilReached(int64_t timeout_ms) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return reached_; });
}

void Gate::pass() {
  const auto deadline = Clock::now() + std::chrono::milliseconds(max_ms_);
  std::unique_lock lock(mutex_);
  reached_ = true;
  changed_.notify_all();
  while (!released_ && !isStopping()) {
    if (Clock::now() >= deadline) {
      expired_ = true;
      ++global().num_expired_gates;
      return;
    }
    changed_.wait_for(lock, kPoll);
  }
}

void setDelays(const DelayOptions& options) {
  std::lock_guard lock(global().delays_mutex);
  global().delays = options;
  ++global().delays_version;
}

void Worker::delay() {
  DelayOptions options;
  {
    std::lock_guard lock(global().delays_mutex);
    options = global().delays;
  }
  if (options.probability <= 0 || options.max_us <= 0) return;
  if (random_version_ != global().delays_version) {
    random_version_ = global().delays_version;
    random_.seed(options.seed * 1000003 + uint64_t(device_) * 1009 + uint64_t(id_));
    stretch_ = 0;
  }
  if (stretch_-- <= 0) {
    slow_ = std::uniform_real_distribution<>(0, 1)(random_) < options.probability;
    stretch_ = std::uniform_int_distribution<>(0, kLongestStretch - 1)(random_);
  }
  if (slow_) std::this_thread::sleep_for(std::chrono::microseconds(std::uniform_int_distribution<int64_t>(0, options.max_us)(random_)));
}

void Worker::enqueue(Task task) {
  TORCH_CHECK(!isInBadFork(), "emu: the device cannot be used in a process forked after its first use");
  if (isStopping()) return;
  std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  if (!running_) {
    noteStart();
    running_ = true;
    std::thread([this] {
      c10::setThreadName("emu_stream");
      loop();
    }).detach();
  }
  changed_.notify_all();
}

void Worker::loop() {
  at::init_num_threads();
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::AutoGradMode no_grad(false);
  current_device = device_;
  current_streams[device_] = id_;
  std::unique_lock lock(mutex_);
  while (true) {
    while (tasks_.empty() && !retired_ && !isStopping()) changed_.wait(lock);
    if (isStopping()) {
      lock.unlock();
      sleepForever();
    }
    if (tasks_.empty()) break;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    busy_ = true;
    ++global().num_active;
    lock.unlock();
    try {
      delay();
      if (!isStopping()) task();
    } catch (const c10::Error& error) {
      setDeviceError(device_, error.what_without_backtrace());
    } catch (const std::exception& error) {
      setDeviceError(device_, error.what());
    }
    if (isStopping()) {
      --global().num_active;
      sleepForever();
    }
    task = nullptr;
    --global().num_active;
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
  running_ = false;
}

RecordingPtr Worker::record() {
  auto recording = std::make_shared<Recording>();
  enqueue([recording] { recording->finish(); });
  return recording;
}

void Worker::block(RecordingPtr recording, std::shared_ptr<const std::atomic<bool>> stop) {
  if (recording->isDone()) return;
  enqueue([recording = std::move(recording), stop = std::move(stop)] { recording->wait(stop.get()); });
}

bool Worker::isIdle() {
  std::lock_guard lock(mutex_);
  return tasks_.empty() && !busy_;
}

void Worker::synchronize() {
  if (!isIdle()) record()->wait();
  throwDeviceError(device_);
}

void Worker::retire() {
  std::lock_guard lock(mutex_);
  retired_ = true;
  changed_.notify_all();
}

Worker& workerOf(const c10::Stream& stream) {
  TORCH_CHECK(stream.device_type() == kDeviceType, "emu: ", stream, " is no stream of this device");
  auto& state = stateOf(stream.device_index());
  std::lock_guard lock(state.mutex);
  TORCH_CHECK(stream.id() >= 0 && size_t(stream.id()) < state.workers.size(), "emu: there is no stream ", stream.id());
  return *state.workers[stream.id()];
}

Worker& newWorker(c10::DeviceIndex device) {
  auto& state = stateOf(device);
  std::lock_guard lock(state.mutex);
  state.workers.push_back(new Worker(device, c10::StreamId(state.workers.size())));
  return *state.workers.back();
}

Worker& pooledWorker(c10::DeviceIndex device) {
  auto& state = stateOf(device);
  const auto id = 1 + state.next_pooled++ % kPoolSize;
  std::lock_guard lock(state.mutex);
  return *state.workers[id];
}

Worker& currentWorker(c10::DeviceIndex device) {
  auto& state = stateOf(device);
  std::lock_guard lock(state.mutex);
  return *state.workers[current_streams[device]];
}

c10::DeviceIndex currentDevice() { return current_device; }

void setCurrentDevice(c10::DeviceIndex device) {
  stateOf(device);
  current_device = device;
}

c10::Stream exchangeCurrentStream(const c10::Stream& stream) {
  const auto next = workerOf(stream).stream();
  const auto previous = currentWorker(next.device_index()).stream();
  current_streams[next.device_index()] = next.id();
  return previous;
}

void synchronizeDevice(c10::DeviceIndex device) {
  auto& state = stateOf(device);
  std::vector<Worker*> workers;
  {
    std::lock_guard lock(state.mutex);
    workers = state.workers;
  }
  std::vector<RecordingPtr> recordings;
  for (auto* worker : workers) {
    if (!worker->isIdle()) recordings.push_back(worker->record());
  }
  for (const auto& recording : recordings) recording->wait();
  throwDeviceError(device);
}

void setDeviceError(c10::DeviceIndex device, const std::string& what) {
  auto& state = stateOf(device);
  std::lock_guard lock(state.mutex);
  if (state.error.empty()) state.error = what;
}

void throwDeviceError(c10::DeviceIndex device) {
  auto& state = stateOf(device);
  std::lock_guard lock(state.mutex);
  TORCH_CHECK(state.error.empty(), "emu:", int(device), ": an earlier operation failed: ", state.error);
}

}  // namespace emu
