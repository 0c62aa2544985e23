#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "c10d/gloo_connections.h"

namespace xmesh::c10d_backend {

constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::minutes(30);

/// Options of a group on xmesh. `gloo` and `nccl`, where given, are handed to the inner backend of that name.
struct XmeshOptions : ::c10d::Backend::Options {
  explicit XmeshOptions(std::chrono::milliseconds timeout = kDefaultTimeout);
  XmeshOptions(const XmeshOptions&) = default;
  ~XmeshOptions() override = default;

  /// Overrides where c10d has it.
  c10::intrusive_ptr<::c10d::Backend::Options> clone() const;

  c10::intrusive_ptr<::c10d::Backend::Options> gloo;
  c10::intrusive_ptr<::c10d::Backend::Options> nccl;
  std::map<std::string, std::string> inner;   ///< which c10d backend carries a kind of accelerator, e.g. {"xpu": "xccl"}; cuda's is nccl unless said
  bool blocking_wait = false;                 ///< Works of reshards on a device block the host in wait() until the device is done
  bool pacing = true;                         ///< pace reshards' direct sends to planned rates, on topologies whose rates were measured
  bool shared_memory = true;                  ///< reshards between ranks at one address go through shared memory where the kernel allows it
  std::string host_id;                        ///< which host this rank is on, for plans; empty for XMESH_HOST_ID or what is discovered
  int64_t staging_bytes = int64_t{64} << 20;  ///< most memory per rank that reshards may stage messages in, all in flight together
};

/// Makes the inner backend of one device kind. May block in a rendezvous of all the group's ranks. Called without locks of the group's callers;
/// takes the GIL itself if it needs it.
using InnerFactory = std::function<c10::intrusive_ptr<::c10d::Backend>(c10::DeviceType kind, const c10::intrusive_ptr<::c10d::Store>& store, int rank,
                                                                       int size, const c10::intrusive_ptr<XmeshOptions>& options)>;

/// What the host language provides.
struct HostHooks {
  InnerFactory make_inner;
  /// Runs the function without the interpreter's lock if the caller holds it.
  std::function<void(const std::function<void()>&)> run_unlocked;
  /// The kinds besides cpu whose inner backend can be had here; calls without tensors go to the first one's.
  std::vector<c10::DeviceType> accelerators;
};

/// Makes an inner backend of some of a group's ranks, for the library's own traffic, which connects it. `name` is alike on all of them, and used
/// once.
using OwnInnerFactory = std::function<c10::intrusive_ptr<::c10d::Backend>(
    c10::Device device, const c10::intrusive_ptr<::c10d::Store>& store, const std::string& name, int rank, const std::vector<int64_t>& global_ranks)>;
OwnInnerFactory ownInnerFactory(const HostHooks& hooks, const XmeshOptions& given);

/// The inner backends of one group, one per device kind, each made once: gloo for cpu, for an accelerator what HostHooks make.
/// Threading: any thread. Ownership: owns the inner backends.
class InnerBackends {
 public:
  InnerBackends(HostHooks hooks, c10::intrusive_ptr<::c10d::Store> store, int rank, int size, c10::intrusive_ptr<XmeshOptions> options);

  /// Held around a call into a backend: endGloo() leaves it alone meanwhile.
  class Inside {
   public:
    explicit Inside(std::atomic<int>& count) : count_(count) { count_.fetch_add(1); }
    ~Inside() { count_.fetch_sub(1); }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    std::atomic<int>& count_;
  };
  Inside inside() { return Inside(num_inside_); }

  /// The kind's backend; `prepare` is applied to it when it is made by this call. NotImplementedError for a kind that no inner backend carries,
  /// and after release().
  ::c10d::Backend& get(c10::DeviceType kind, const std::function<void(::c10d::Backend&)>& prepare);
  /// The kind's backend if it was made, else nullptr.
  ::c10d::Backend* made(c10::DeviceType kind) const;
  /// Calls `visit` on every backend made so far.
  void forEach(const std::function<void(::c10d::Backend&)>& visit) const;
  /// Whether one of an accelerator was made; abortAccelerators() ends what these have in flight, and may wait for the devices.
  bool hasAccelerators() const;
  void abortAccelerators() const noexcept;
  /// True if the kind can be carried on this machine.
  bool canMake(c10::DeviceType kind) const;
  /// The kind for calls without tensors: the first accelerator, or cpu.
  c10::DeviceType primary() const { return hooks_.accelerators.empty() ? c10::DeviceType::CPU : hooks_.accelerators.front(); }
  /// Ends the backends made so far, without the interpreter's lock: their threads may need it to end.
  void end() noexcept;
  /// Ends gloo's backend on a thread of its own: it first does the work it was given. None is made from now on. Where a call is inside it, it stays
  /// (no future).
  std::future<void> endGloo() noexcept;
  /// Lets go of the store; called once the group has ended.
  void dropStore() noexcept { store_.reset(); }
  /// Gives up ownership without destroying anything: for a forked child, which has none of the backends' threads.
  void leak() noexcept;

  /// Those of gloo's backend.
  const std::shared_ptr<GlooConnections>& glooConnections() const { return gloo_connections_; }
  const HostHooks& hooks() const { return hooks_; }
  const c10::intrusive_ptr<::c10d::Store>& store() const { return store_; }

 private:
  struct Slot {
    std::atomic<::c10d::Backend*> fast{nullptr};
    c10::intrusive_ptr<::c10d::Backend> owner;
  };
  const Slot& slotOf(c10::DeviceType kind) const { return slots_.at(static_cast<size_t>(kind)); }
  Slot& slotOf(c10::DeviceType kind) { return slots_.at(static_cast<size_t>(kind)); }
  std::string carried() const;
  ::c10d::Backend& make(c10::DeviceType kind, const std::function<void(::c10d::Backend&)>& prepare);

  HostHooks hooks_;
  c10::intrusive_ptr<::c10d::Store> store_;
  int rank_;
  int size_;
  c10::intrusive_ptr<XmeshOptions> options_;
  std::mutex mutex_;
  std::array<Slot, c10::COMPILE_TIME_MAX_DEVICE_TYPES> slots_;  ///< by kind
  std::atomic<bool> is_ended_{false};
  std::atomic<int> num_inside_{0};
  const std::shared_ptr<GlooConnections> gloo_connections_ = std::make_shared<GlooConnections>();
};

}  // namespace xmesh::c10d_backend
