// Streams, events and gates of the emulated device. A stream is a queue with a thread; device memory is host memory.
// Thread-safe throughout. Streams live for the whole process; no thread here ever takes Python's lock.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace emu {

inline constexpr c10::DeviceIndex kNumDevices = 2;
inline constexpr int kPoolSize = 8;
inline constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;

using Task = std::function<void()>;
using Clock = std::chrono::steady_clock;

// One recording of an event: done once its stream has come to it.
class Recording {
 public:
  void finish();
  bool isDone() const { return done_.load(std::memory_order_acquire); }
  // Blocks the calling thread. Ends early, with false, when `stop` becomes true, at `deadline` or at the end of the process.
  bool wait(const std::atomic<bool>* stop = nullptr, Clock::time_point deadline = Clock::time_point::max()) const;
  Clock::time_point finishedAt() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable done_changed_;
  std::atomic<bool> done_{false};
  Clock::time_point finished_at_;
};
using RecordingPtr = std::shared_ptr<Recording>;

// Stops a stream until it is released, or until its time is over: then it has expired, and release() throws.
class Gate {
 public:
  explicit Gate(int64_t max_ms) : max_ms_(max_ms) {}
  void release();
  bool isExpired() const;
  // Whether the stream has come to the gate; waits for that up to `timeout_ms`.
  bool waitUntilReached(int64_t timeout_ms);
  void pass();

 private:
  const int64_t max_ms_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  bool released_ = false;
  bool expired_ = false;
};

// Random delays before tasks: a stream is slow or fast for up to 16 tasks in a row.
struct DelayOptions {
  double probability = 0;
  int64_t max_us = 0;
  uint64_t seed = 0;
};
void setDelays(const DelayOptions& options);

// A stream. Tasks run one after another, in the order of enqueue(), on a thread that starts with the first of them.
class Worker {
 public:
  Worker(c10::DeviceIndex device, c10::StreamId id) : device_(device), id_(id) {}
  void enqueue(Task task);
  RecordingPtr record();
  // Later tasks wait until `recording` is done, or until `stop` is true.
  void block(RecordingPtr recording, std::shared_ptr<const std::atomic<bool>> stop = nullptr);
  bool isIdle();
  void synchronize();
  // Lets the thread end once the queue is empty. A later task starts another one.
  void retire();
  c10::Stream stream() const { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, device_), id_); }
  c10::DeviceIndex device() const { return device_; }

 private:
  void loop();
  void delay();

  const c10::DeviceIndex device_;
  const c10::StreamId id_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool running_ = false;
  bool busy_ = false;
  bool retired_ = false;
  std::mt19937_64 random_;
  uint64_t random_version_ = 0;
  int stretch_ = 0;
  bool slow_ = false;
};

// Stream 0 is the default one, 1 to 8 are the pool, later ones have been made by newWorker().
Worker& workerOf(const c10::Stream& stream);
Worker& newWorker(c10::DeviceIndex device);
Worker& pooledWorker(c10::DeviceIndex device);
Worker& currentWorker(c10::DeviceIndex device);
c10::DeviceIndex currentDevice();
void setCurrentDevice(c10::DeviceIndex device);
c10::Stream exchangeCurrentStream(const c10::Stream& stream);
void synchronizeDevice(c10::DeviceIndex device);

// The first error of a task on this device is thrown by every later synchronization, as a failed kernel's is.
void setDeviceError(c10::DeviceIndex device, const std::string& what);
void throwDeviceError(c10::DeviceIndex device);

int64_t numExpiredGates();
// True from the end of the process on: whatever waits must return.
bool isStopping();
// True in a process forked from one that had started a stream.
bool isInBadFork();

}  // namespace emu
