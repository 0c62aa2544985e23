#include "c10d/inner_backends.h"

#include <algorithm>
#include <future>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

namespace xmesh::c10d_backend {

XmeshOptions::XmeshOptions(std::chrono::milliseconds timeout) : Options("xmesh", timeout) {}

c10::intrusive_ptr<::c10d::Backend::Options> XmeshOptions::clone() const { return c10::make_intrusive<XmeshOptions>(*this); }

OwnInnerFactory ownInnerFactory(const HostHooks& hooks, const XmeshOptions& given) {
  return [make = hooks.make_inner, given = c10::make_intrusive<XmeshOptions>(given)](
             c10::Device device, const c10::intrusive_ptr<::c10d::Store>& store, const std::string& name, int rank,
             const std::vector<int64_t>& global_ranks) {
    auto options = c10::make_intrusive<XmeshOptions>(*given);
    options->timeout = 2 * options->timeout + std::chrono::minutes(1);  // what times out is the reshard
    options->group_name += "/xmesh/" + name;
    options->global_ranks_in_group.assign(global_ranks.begin(), global_ranks.end());
    return make(device.type(), c10::make_intrusive<::c10d::PrefixStore>(name, store), rank, static_cast<int>(global_ranks.size()), options);
  };
}

InnerBackends::InnerBackends(HostHooks hooks, c10::intrusive_ptr<::c10d::Store> store, int rank, int size, c10::intrusive_ptr<XmeshOptions> options)
    : hooks_(std::move(hooks)), store_(std::move(store)), rank_(rank), size_(size), options_(std::move(options)) {}

bool InnerBackends::canMake(c10::DeviceType kind) const {
  return kind == c10::DeviceType::CPU || std::find(hooks_.accelerators.begin(), hooks_.accelerators.end(), kind) != hooks_.accelerators.end();
}

::c10d::Backend* InnerBackends::made(c10::DeviceType kind) const { return slotOf(kind).fast.load(); }

::c10d::Backend& InnerBackends::get(c10::DeviceType kind, const std::function<void(::c10d::Backend&)>& prepare) {
  if (::c10d::Backend* backend = made(kind)) {
    return *backend;
  }
  return make(kind, prepare);
}

std::string InnerBackends::carried() const {
  std::string out = "cpu tensors";
  for (const c10::DeviceType kind : hooks_.accelerators) {
    out += " and " + c10::DeviceTypeName(kind, /*lower_case=*/true) + " tensors";
  }
  return hooks_.accelerators.empty() ? out + " (and those of an accelerator where it and its inner backend are there)" : out;
}

::c10d::Backend& InnerBackends::make(c10::DeviceType kind, const std::function<void(::c10d::Backend&)>& prepare) {
  TORCH_CHECK_NOT_IMPLEMENTED(canMake(kind), "Backend xmesh carries ", carried(), ", got a ", c10::DeviceTypeName(kind, /*lower_case=*/true),
                              " tensor on group rank ", rank_);
  TORCH_CHECK(!is_ended_.load(), "xmesh: the process is about to end, and with it this group: no collective can be called on it any more");
  ::c10d::Backend* result = nullptr;
  // The factory needs the GIL, and another thread may hold it while it waits for the mutex.
  hooks_.run_unlocked([&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    Slot& slot = slotOf(kind);
    if (!slot.owner) {
      const bool is_gloo = kind == c10::DeviceType::CPU;
      auto backend = hooks_.make_inner(kind, is_gloo ? GlooConnections::listeningStore(gloo_connections_, store_) : store_, rank_, size_, options_);
      TORCH_CHECK(backend, "xmesh: the factory of the ", c10::DeviceTypeName(kind, true), " backend returned None");
      if (is_gloo) {
        gloo_connections_->find(size_);
      }
      prepare(*backend);
      slot.owner = std::move(backend);
      slot.fast.store(slot.owner.get());
    }
    result = slot.owner.get();
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

bool InnerBackends::hasAccelerators() const {
  return std::any_of(slots_.begin(), slots_.end(),
                     [this](const Slot& slot) { return &slot != &slotOf(c10::DeviceType::CPU) && slot.fast.load() != nullptr; });
}

void InnerBackends::abortAccelerators() const noexcept {
  for (const Slot& slot : slots_) {
    ::c10d::Backend* const backend = &slot == &slotOf(c10::DeviceType::CPU) ? nullptr : slot.fast.load(std::memory_order_acquire);
    try {
      if (backend != nullptr) {
        backend->abort();
      }
    } catch (const std::exception& error) {
      LOG(WARNING) << "xmesh: collectives of " << backend->getBackendName() << " could not be aborted: " << error.what();
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
  Slot& slot = slotOf(c10::DeviceType::CPU);
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
