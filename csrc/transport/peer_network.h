#pragma once

#include <functional>

#include "transport/control_network.h"
#include "transport/host_transport.h"

namespace xmesh::transport {

/// A ControlNetwork whose connections also move the tensors' bytes, on the same thread.
class PeerNetwork : public ControlNetwork, public HostTransport {
 public:
  void post(std::function<void()> task) override = 0;
};

}  // namespace xmesh::transport
