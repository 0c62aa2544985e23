#include "c10d/inner_backends.h"

#include <future>
#include <thread>
#include <utility>

namespace xmesh::c10d_backend {

XmeshOptions::XmeshOptions(std::chrono::milliseconds timeout) : Options("xmesh", timeout) {}

c10::intrusive_ptr<::c10d::Backend::Options> XmeshOptions::clone() const { return c10::make_intrusive<XmeshOptions>(*this); }

InnerBackends::InnerBackends(HostHooks hooks, c10::intrusive_ptr<::c10d::Store> store, int rank, int size, c10::intrusive_ptr<XmeshOptions> options)
    : hooks_(std::move(hooks)), store_(std::move(store)), rank_(rank), size_(size), options_(std::move(options)) {}

std::optional<size_t> InnerBackends::slotOf(c10::DeviceType kind) {
  switch (kind) {
    case c10::DeviceType::CPU:
      return 0;
    case c10::DeviceType::CUDA:
      return 1;
    default:
      return std::nullopt;
  }
}

bool InnerBackends::canMake(c10::DeviceType kind) const { return kind == c10::DeviceType::CPU || (kind == c10::DeviceType::CUDA && hooks_.has_cuda); }

::c10d::Backend* InnerBackends::made(c10::DeviceType kind) const {
  const auto slot = slotOf(kind);
  return slot ? slots_[*slot].fast.load() : nullptr;
}

::c10d::Backend& InnerBackends::get(c10::DeviceType kind, const std::function<void(::c10d::Backend&)>& prepare) {
  if (::c10d::Backend* backend = made(kind)) {
    return *backend;
  }
  return make(kind, prepare);
}

::c10d::Backend& InnerBackends::make(c10::DeviceType kind, const std::function<void(::c10d::Backend&)>& prepare) {
  const auto slot = slotOf(kind);
  TORCH_CHECK_NOT_IMPLEMENTED(slot && canMake(kind), "Backend xmesh carries cpu tensors",
                              hooks_.has_cuda ? " and cuda tensors" : " (and cuda tensors where NCCL and a GPU are there)", ", got a ",
                              c10::DeviceTypeName(kind, /*lower_case=*/true), " tensor on group rank ", rank_);
  TORCH_CHECK(!is_ended_.load(), "xmesh: the process is about to end, and with it this group: no collective can be called on it any more");
  ::c10d::Backend* result = nullptr;
  // The factory needs the GIL, and another thread may hold it while it waits for the mutex.
  hooks_.run_unlocked([&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    Slot& slot_here = slots_[*slot];
    if (!slot_here.owner) {
      auto backend = hooks_.make_inner(kind, store_, rank_, size_, options_);
      TORCH_CHECK(backend, "xmesh: the factory of the ", c10::DeviceTypeName(kind, true), " backend returned None");
      prepare(*backend);
      slot_here.owner = std::move(backend);
      slot_here.fast.store(slot_here.owner.get());
    }
    result = slot_here.owner.get();
  });
  return *result;
}

void InnerBackends::forEach(const std::function<void(::c10d::Backend&)>& visit) const {
  for (const Slot& slot : slots_) {
    if (::c10d::Backend* backend = slot.fast.load(std::memory_order_acquire)) {
      visit(*backend);
    }
  }
}

void InnerBackends::end() noexcept {
  hooks_.run_unlocked([this] {
    for (Slot& slot : slots_) {
      slot.fast.store(nullptr, std::memory_order_release);
      slot.owner.reset();
    }
  });
}

std::future<void> InnerBackends::endGloo() noexcept {
  is_ended_.store(true);
  Slot& slot = slots_[*slotOf(c10::DeviceType::CPU)];
  slot.fast.store(nullptr);
  if (num_inside_.load() > 0) {
    return {};
  }
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!slot.owner) {
      return {};
    }
    ::c10d::Backend* gloo = slot.owner.release();  // where no thread can be started, the end of the process ends it
    std::promise<void> ended;
    std::future<void> is_ended = ended.get_future();
    std::thread([gloo, ended = std::move(ended)]() mutable {
      c10::intrusive_ptr<::c10d::Backend>::reclaim(gloo).reset();
      ended.set_value();
    }).detach();
    return is_ended;
  } catch (const std::exception&) {
    return {};
  }
}

void InnerBackends::leak() noexcept {
  for (Slot& slot : slots_) {
    slot.fast.store(nullptr, std::memory_order_release);
    static_cast<void>(slot.owner.release());
  }
  static_cast<void>(store_.release());
}

}  // namespace xmesh::c10d_backend
