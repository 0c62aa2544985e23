#include "allocator.h"

#include <array>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "runtime.h"

namespace emu {
namespace {

constexpr size_t kRounding = 512;
constexpr int kPoisonByte = 0xFF;
constexpr size_t kDeviceBytes = size_t{16} << 30;

struct Block {
  void* data;
  size_t num_bytes;
  Worker* worker;
  std::set<Worker*> used_by;
};

struct PendingBlock {
  Block* block;
  std::vector<RecordingPtr> uses;
};

struct DevicePools {
  std::map<Worker*, std::vector<Block*>> free_blocks;
  std::list<PendingBlock> pending;
  MemoryCounts counts;
  int64_t total_allocated = 0;
};

void freeBlock(void* context);

class CachingAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    const auto index = currentDevice();
    const c10::Device device(kDeviceType, index);
    if (num_bytes == 0) return {nullptr, nullptr, &freeBlock, device};
    auto& worker = currentWorker(index);
    std::lock_guard lock(mutex_);
    collect(index);
    auto* block = take(worker, (num_bytes + kRounding - 1) / kRounding * kRounding);
    auto& pools = pools_[index];
    pools.counts.live_bytes += int64_t(block->num_bytes);
    pools.total_allocated += int64_t(block->num_bytes);
    pools.counts.peak_bytes = std::max(pools.counts.peak_bytes, pools.counts.live_bytes);
    live_[block->data] = block;
    return {block->data, block, &freeBlock, device};
  }

  void release(Block* block) {
    std::lock_guard lock(mutex_);
    auto& pools = pools_[block->worker->device()];
    live_.erase(block->data);
    pools.counts.live_bytes -= int64_t(block->num_bytes);
    if (block->used_by.empty()) {
      giveBack(block);
      return;
    }
    PendingBlock pending{block, {}};
    for (auto* worker : block->used_by) pending.uses.push_back(worker->record());
    block->used_by.clear();
    pools.counts.pending_bytes += int64_t(block->num_bytes);
    pools.pending.push_back(std::move(pending));
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    auto& worker = workerOf(stream);
    std::lock_guard lock(mutex_);
    const auto found = live_.find(pointer.get());
    if (found != live_.end() && found->second->worker != &worker) found->second->used_by.insert(&worker);
  }

  void emptyCache(c10::MempoolId_t /*unused*/) override {
    for (c10::DeviceIndex device = 0; device < kNumDevices; ++device) synchronizeDevice(device);
    std::vector<Block*> blocks;
    {
      std::lock_guard lock(mutex_);
      for (c10::DeviceIndex device = 0; device < kNumDevices; ++device) {
        collect(device);
        for (auto& [worker, free_blocks] : pools_[device].free_blocks) blocks.insert(blocks.end(), free_blocks.begin(), free_blocks.end());
        pools_[device].free_blocks.clear();
        pools_[device].counts.cached_bytes = 0;
      }
    }
    // Poison of what was pending until now may be in a queue.
    for (c10::DeviceIndex device = 0; device < kNumDevices; ++device) synchronizeDevice(device);
    for (auto* block : blocks) {
      std::free(block->data);
      delete block;
    }
  }

  MemoryCounts counts(c10::DeviceIndex device) {
    std::lock_guard lock(mutex_);
    collect(device);
    return pools_[device].counts;
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const auto now = counts(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = now.live_bytes;
    stats.allocated_bytes[0].peak = now.peak_bytes;
    stats.allocated_bytes[0].allocated = pools_[device].total_allocated;
    stats.active_bytes[0].current = now.live_bytes + now.pending_bytes;
    stats.reserved_bytes[0].current = now.live_bytes + now.pending_bytes + now.cached_bytes;
    return stats;
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const auto now = counts(device);
    return {kDeviceBytes - size_t(now.live_bytes + now.pending_bytes + now.cached_bytes), kDeviceBytes};
  }

  bool initialized() override { return true; }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    pools_[device].total_allocated = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    pools_[device].counts.peak_bytes = pools_[device].counts.live_bytes;
  }
  void copy_data(void* destination, const void* source, size_t num_bytes) const override {
    currentWorker(currentDevice()).enqueue([=] { std::memcpy(destination, source, num_bytes); });
  }
  void setPoison(bool on) { poison_ = on; }

 private:
  // Best fit up to twice the size, the last one freed first.
  Block* take(Worker& worker, size_t num_bytes) {
    auto& free_blocks = pools_[worker.device()].free_blocks[&worker];
    auto best = free_blocks.rend();
    for (auto it = free_blocks.rbegin(); it != free_blocks.rend(); ++it) {
      if ((*it)->num_bytes < num_bytes || (*it)->num_bytes > 2 * num_bytes) continue;
      if (best == free_blocks.rend() || (*it)->num_bytes < (*best)->num_bytes) best = it;
    }
    if (best != free_blocks.rend()) {
      auto* block = *best;
      free_blocks.erase(std::next(best).base());
      pools_[worker.device()].counts.cached_bytes -= int64_t(block->num_bytes);
      return block;
    }
    auto* data = std::aligned_alloc(kRounding, num_bytes);
    TORCH_CHECK(data != nullptr, "emu: no memory for ", num_bytes, " bytes");
    if (poison_) std::memset(data, kPoisonByte, num_bytes);
    return new Block{data, num_bytes, &worker, {}};
  }

  void giveBack(Block* block) {
    if (poison_) {
      block->worker->enqueue([data = block->data, num_bytes = block->num_bytes] { std::memset(data, kPoisonByte, num_bytes); });
    }
    auto& pools = pools_[block->worker->device()];
    pools.free_blocks[block->worker].push_back(block);
    pools.counts.cached_bytes += int64_t(block->num_bytes);
  }

  void collect(c10::DeviceIndex device) {
    auto& pools = pools_[device];
    for (auto it = pools.pending.begin(); it != pools.pending.end();) {
      bool done = true;
      for (const auto& use : it->uses) done = done && use->isDone();
      if (!done) {
        ++it;
        continue;
      }
      pools.counts.pending_bytes -= int64_t(it->block->num_bytes);
      giveBack(it->block);
      it = pools.pending.erase(it);
    }
  }

  std::mutex mutex_;
  std::array<DevicePools, kNumDevices> pools_;
  std::unordered_map<const void*, Block*> live_;
  std::atomic<bool> poison_{true};
};

CachingAllocator& instance() {
  static auto* allocator = new CachingAllocator;
  return *allocator;
}

void freeBlock(void* context) {
  if (context != nullptr && !isStopping() && !isInBadFork()) instance().release(static_cast<Block*>(context));
}

const bool kRegistered = [] {
  c10::SetAllocator(kDeviceType, &instance());
  return true;
}();

}  // namespace

c10::DeviceAllocator& allocator() { return instance(); }
MemoryCounts memoryCounts(c10::DeviceIndex device) { return instance().counts(device); }
void setPoison(bool on) { instance().setPoison(on); }

}  // namespace emu
