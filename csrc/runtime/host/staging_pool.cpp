#include "runtime/host/staging_pool.h"

#include <algorithm>
#include <new>
#include <string>

#include "core/error.h"

namespace xmesh::runtime {
namespace {

constexpr std::align_val_t kAlignment{64};
constexpr int64_t kSmallestBytes = 64;

void freeBuffer(const StagingBuffer& buffer) { ::operator delete(buffer.data, kAlignment); }

}  // namespace

StagingPool::StagingPool(int64_t bound_bytes) : bound_bytes_(bound_bytes) {
  core::require(bound_bytes > 0, "the staging bound must be positive, got " + std::to_string(bound_bytes) + " bytes");
  for (Budget& of_kind : budgets_) {
    of_kind.bound_bytes = bound_bytes / static_cast<int64_t>(kNumStagingKinds);
  }
}

StagingPool::~StagingPool() { trim(); }

StagingBuffer StagingPool::acquire(StagingKind kind, int64_t num_bytes, StagingClient& client) {
  Budget& from = budget(kind);
  const size_t index = static_cast<size_t>(kind);
  const bool is_first = !from.waiters.empty() && from.waiters.front().client == &client;
  const bool has_room = from.bytes_in_use + num_bytes <= from.bound_bytes && (from.waiters.empty() || is_first);
  const auto own = std::find_if(from.waiters.begin(), from.waiters.end(), [&client](const Waiter& waiter) { return waiter.client == &client; });
  if (!has_room && client.num_held_[index] > 0) {
    if (own == from.waiters.end()) {
      from.waiters.push_back({&client, num_bytes, next_ticket_++});
    } else {
      own->num_bytes = num_bytes;
    }
    return {};
  }
  if (own != from.waiters.end()) {
    from.waiters.erase(own);
  }
  StagingBuffer buffer = allocate(num_bytes);
  buffer.kind = kind;
  from.bytes_in_use += buffer.capacity;
  ++client.num_held_[index];
  bytes_in_use_.store(bytesInUse() + buffer.capacity, std::memory_order_relaxed);
  peak_bytes_.store(std::max(peakBytes(), bytesInUse() + bytes_cached_), std::memory_order_relaxed);
  return buffer;
}

StagingBuffer StagingPool::allocate(int64_t num_bytes) {
  // The best cached buffer wastes at most an eighth, so that what is in use stays close to what was asked for.
  auto best = cached_.end();
  for (auto it = cached_.begin(); it != cached_.end(); ++it) {
    const bool fits = it->capacity >= num_bytes && it->capacity <= std::max(kSmallestBytes, num_bytes + num_bytes / 8);
    if (fits && (best == cached_.end() || it->capacity < best->capacity)) {
      best = it;
    }
  }
  if (best != cached_.end()) {
    const StagingBuffer buffer = *best;
    *best = cached_.back();
    cached_.pop_back();
    bytes_cached_ -= buffer.capacity;
    return buffer;
  }
  const int64_t capacity = std::max(kSmallestBytes, num_bytes);
  freeCachedDownTo(std::max<int64_t>(0, bound_bytes_ - bytesInUse() - capacity));
  return {.data = static_cast<std::byte*>(::operator new(static_cast<size_t>(capacity), kAlignment)), .capacity = capacity};
}

void StagingPool::freeCachedDownTo(int64_t num_bytes) {
  while (bytes_cached_ > num_bytes) {
    bytes_cached_ -= cached_.back().capacity;
    freeBuffer(cached_.back());
    cached_.pop_back();
  }
}

void StagingPool::release(const StagingBuffer& buffer, StagingClient& client) {
  budget(buffer.kind).bytes_in_use -= buffer.capacity;
  --client.num_held_[static_cast<size_t>(buffer.kind)];
  bytes_in_use_.store(bytesInUse() - buffer.capacity, std::memory_order_relaxed);
  cached_.push_back(buffer);
  bytes_cached_ += buffer.capacity;
}

void StagingPool::serve() {
  if (is_serving_) {
    return;
  }
  is_serving_ = true;
  for (Budget& from : budgets_) {
    while (!from.waiters.empty() && from.bytes_in_use + from.waiters.front().num_bytes <= from.bound_bytes) {
      const uint64_t ticket = from.waiters.front().ticket;
      from.waiters.front().client->onStagingFree();
      if (!from.waiters.empty() && from.waiters.front().ticket == ticket) {
        break;  // in the middle of its own work: it asks again before it is through, and serves the others then
      }
    }
  }
  is_serving_ = false;
}

void StagingPool::withdraw(StagingKind kind, const StagingClient& client) {
  std::erase_if(budget(kind).waiters, [&client](const Waiter& waiter) { return waiter.client == &client; });
}

void StagingPool::forget(StagingClient& client) {
  for (size_t kind = 0; kind < kNumStagingKinds; ++kind) {
    withdraw(static_cast<StagingKind>(kind), client);
  }
}

void StagingPool::trim() { freeCachedDownTo(0); }

}  // namespace xmesh::runtime
