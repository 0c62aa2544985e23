// What Python sees of the emulated device. Only this file knows Python.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "allocator.h"
#include "backend.h"
#include "communicator.h"
#include "ops.h"
#include "runtime.h"
#include "self_test.h"

namespace py = pybind11;
using Unlocked = py::call_guard<py::gil_scoped_release>;

namespace {

void bindRuntime(py::module_& module) {
  py::class_<emu::Gate, std::shared_ptr<emu::Gate>>(module, "Gate")
      .def("release", &emu::Gate::release, "Lets the stream go on. Raises if the gate has opened by itself before.")
      .def_property_readonly("expired", &emu::Gate::isExpired)
      .def("wait_until_reached", &emu::Gate::waitUntilReached, py::arg("timeout_ms") = 5000, Unlocked());
  module.def(
      "hold",
      [](int64_t id, c10::DeviceIndex device, int64_t max_ms) {
        auto gate = std::make_shared<emu::Gate>(max_ms);
        emu::workerOf(c10::Stream(c10::Stream::UNSAFE, c10::Device(emu::kDeviceType, device), id)).enqueue([gate] { gate->pass(); });
        return gate;
      },
      py::arg("stream_id"), py::arg("device"), py::arg("max_ms"), Unlocked());
  module.def(
      "delays", [](double probability, int64_t max_us, uint64_t seed) { emu::setDelays({probability, max_us, seed}); }, py::arg("probability"),
      py::arg("max_us"), py::arg("seed"));
  module.def("device_count", [] { return int(emu::kNumDevices); });
  module.def("current_device", [] { return int(emu::currentDevice()); });
  module.def("set_device", [](c10::DeviceIndex device) { emu::setCurrentDevice(device); });
  module.def("synchronize", &emu::synchronizeDevice, Unlocked());
  module.def("is_in_bad_fork", &emu::isInBadFork);
  module.def("expired_gates", &emu::numExpiredGates);
}

void bindMemory(py::module_& module) {
  module.def("poison", &emu::setPoison, py::arg("on"));
  module.def("empty_cache", [] { emu::allocator().emptyCache(); }, Unlocked());
  module.def("memory", [](c10::DeviceIndex device) {
    const auto counts = emu::memoryCounts(device);
    return std::map<std::string, int64_t>{
        {"live", counts.live_bytes}, {"peak", counts.peak_bytes}, {"pending", counts.pending_bytes}, {"cached", counts.cached_bytes}};
  });
  module.def("counters", [] {
    const auto& counts = emu::operatorCounts();
    return std::map<std::string, int64_t>{{"async", counts.num_async}, {"synced", counts.num_synced}};
  });
}

void bindBackend(py::module_& module) {
  py::module_::import("torch.distributed");
  module.def("communicators", &emu::Communicator::numLive);
  module.def("communicator_bytes", &emu::Communicator::numLiveBytes);
  module.def("work_error", [](const c10::intrusive_ptr<c10d::Work>& work) -> std::optional<std::string> {
    const auto exception = work->exception();
    if (!exception) return std::nullopt;
    try {
      std::rethrow_exception(exception);
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
  });
  // Python's lock is kept: whatever needs it on the way would never return.
  module.def("exchange_on_plain_thread", &emu::exchangeOnPlainThread);
  py::class_<emu::EmuNccl, c10d::Backend, c10::intrusive_ptr<emu::EmuNccl>>(module, "EmuNccl")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout) {
             return c10::make_intrusive<emu::EmuNccl>(store, rank, size, timeout);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), Unlocked());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  bindRuntime(module);
  bindMemory(module);
  bindBackend(module);
}
