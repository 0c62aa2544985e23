// What generic PyTorch code reaches the device by: its guard (streams and events) and its hooks.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "allocator.h"
#include "runtime.h"

namespace emu {
namespace {

// The state behind a c10::Event. Only its last recording counts.
struct EventState {
  c10::DeviceIndex device = 0;
  std::mutex mutex;
  RecordingPtr last;

  RecordingPtr get() {
    std::lock_guard lock(mutex);
    return last;
  }
};

RecordingPtr lastOf(void* event) { return event == nullptr ? nullptr : static_cast<EventState*>(event)->get(); }

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device getDevice() const override { return {kDeviceType, currentDevice()}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto previous = getDevice();
    setDevice(device);
    return previous;
  }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) setCurrentDevice(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && device.index() < kNumDevices) setCurrentDevice(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  c10::DeviceCapability getDeviceCapability(c10::Device /*unused*/) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override { return currentWorker(indexOf(device)).stream(); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kDeviceType, indexOf(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_high_priority) const override {
    return is_high_priority ? newWorker(indexOf(device)).stream() : pooledWorker(indexOf(device)).stream();
  }
  // A negative priority is a high one: such a stream has a thread of its own.
  c10::Stream getNewStream(c10::Device device, int priority) const override { return getStreamFromGlobalPool(device, priority < 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchangeCurrentStream(stream); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &workerOf(stream); }
  bool queryStream(const c10::Stream& stream) const override { return workerOf(stream).isIdle(); }
  void synchronizeStream(const c10::Stream& stream) const override { workerOf(stream).synchronize(); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { emu::synchronizeDevice(device < 0 ? currentDevice() : device); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*unused*/, c10::EventFlag /*unused*/) const override {
    if (*event == nullptr) *event = new EventState;
    auto* state = static_cast<EventState*>(*event);
    std::lock_guard lock(state->mutex);
    state->device = stream.device_index();
    state->last = workerOf(stream).record();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (auto last = lastOf(event)) workerOf(stream).block(std::move(last));
  }
  bool queryEvent(void* event) const override {
    const auto last = lastOf(event);
    if (last == nullptr) return true;
    if (!last->isDone()) return false;
    throwDeviceError(static_cast<EventState*>(event)->device);  // an error stays: whoever asks is told
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (const auto last = lastOf(event)) last->wait();
  }
  void destroyEvent(void* event, c10::DeviceIndex /*unused*/) const noexcept override { delete static_cast<EventState*>(event); }
  double elapsedTime(void* first, void* second, c10::DeviceIndex /*unused*/) const override {
    const auto start = lastOf(first);
    const auto end = lastOf(second);
    TORCH_CHECK(start && end && start->isDone() && end->isDone(), "emu: both events must have been recorded and reached");
    return std::chrono::duration<double, std::milli>(end->finishedAt() - start->finishedAt()).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    if (pointer) allocator().recordStream(pointer, stream);
  }

 private:
  static c10::DeviceIndex indexOf(c10::Device device) { return device.has_index() ? device.index() : currentDevice(); }
};

// Pinned memory is plain memory that is known by its address. What is freed is kept for the next of its size, as CUDA's is: new memory costs a
// fault for each of its pages.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    if (num_bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    std::lock_guard lock(mutex_);
    const auto known = free_.find(num_bytes);
    void* const data = known == free_.end() ? std::malloc(num_bytes) : known->second;
    TORCH_CHECK(data != nullptr, "emu: no memory for ", num_bytes, " pinned bytes");
    if (known != free_.end()) free_.erase(known);
    pinned_[data] = num_bytes;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  bool isPinned(const void* data) {
    std::lock_guard lock(mutex_);
    auto after = pinned_.upper_bound(data);
    if (after == pinned_.begin()) return false;
    --after;
    return data < static_cast<const char*>(after->first) + after->second;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* destination, const void* source, size_t num_bytes) const override { std::memcpy(destination, source, num_bytes); }

  static PinnedAllocator& instance() {
    static auto* allocator = new PinnedAllocator;
    return *allocator;
  }

 private:
  static void release(void* data) {
    if (data == nullptr) return;
    std::lock_guard lock(instance().mutex_);
    const auto found = instance().pinned_.find(data);
    instance().free_.emplace(found->second, data);
    instance().pinned_.erase(found);
  }
  std::mutex mutex_;
  std::map<const void*, size_t> pinned_;
  std::multimap<size_t, void*> free_;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*unused*/) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { emu::setCurrentDevice(device); }
  c10::DeviceIndex getCurrentDevice() const override { return currentDevice(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto previous = currentDevice();
    if (device >= 0) emu::setCurrentDevice(device);
    return previous;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::instance().isPinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::instance(); }
  c10::Device getDeviceFromPtr(void* /*unused*/) const override { return {kDeviceType, currentDevice()}; }
  // Numbers are drawn from the CPU's generator, so that a program draws the same ones on either device.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*unused*/) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex /*unused*/) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    auto data = num_bytes == 0 ? c10::DataPtr(nullptr, storage.device()) : allocator().allocate(num_bytes);
    const auto num_kept = std::min(num_bytes, storage.nbytes());
    if (num_kept > 0) {
      currentWorker(storage.device().index()).enqueue([to = data.get(), from = storage.data(), num_kept] { std::memcpy(to, from, num_kept); });
    }
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(num_bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl);

const bool kGuardRegistered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
}  // namespace emu
