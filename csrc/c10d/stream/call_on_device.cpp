#include "c10d/stream/call_on_device.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace xmesh::c10d_backend {
namespace {

c10::Stream currentStream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

}  // namespace

CallOnDevice::CallOnDevice(c10::Device device) : device_(device), ready_(device.type()), end_(device.type()) {
  ready_.record(currentStream(device_));
}

void CallOnDevice::waitForCaller(void* /*stream*/) { ready_.block(currentStream(device_)); }

void CallOnDevice::markEnd(void* /*stream*/) { end_.record(currentStream(device_)); }

void CallOnDevice::orderCurrentStream() { end_.block(currentStream(device_)); }

}  // namespace xmesh::c10d_backend
