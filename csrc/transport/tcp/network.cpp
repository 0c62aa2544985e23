#include "transport/tcp/network.h"

#include <utility>

#include "transport/tcp/network_impl.h"

namespace xmesh::transport {

TcpNetwork::TcpNetwork(TcpNetworkOptions options, PeerEvents& events) : impl_(std::make_unique<Impl>(std::move(options), events)) {}

TcpNetwork::~TcpNetwork() {
  if (impl_->pid_ != ::getpid()) {
    // The thread lives in the parent only, and the epoll set is shared with it: nothing here may be touched.
    static_cast<void>(impl_.release());
  }
}

std::string TcpNetwork::address() const { return impl_->address_; }
bool TcpNetwork::drain(std::chrono::milliseconds timeout) { return impl_->drain(timeout); }
int64_t TcpNetwork::numRejectedConnections() const { return impl_->num_rejected_.load(); }
void TcpNetwork::post(std::function<void()> task) { impl_->post(std::move(task)); }

void TcpNetwork::open(OperationId operation, OperationEvents& events) {
  impl_->checkedLoop("open");
  impl_->open(operation, events);
}

void TcpNetwork::send(OperationId operation, int32_t peer, const void* data, int64_t num_bytes, int64_t cookie) {
  impl_->checkedLoop("send");
  impl_->send(operation, peer, data, num_bytes, cookie);
}

void TcpNetwork::recv(OperationId operation, int32_t peer, void* data, int64_t num_bytes, int64_t cookie) {
  impl_->checkedLoop("recv");
  impl_->recv(operation, peer, data, num_bytes, cookie);
}

void TcpNetwork::close(OperationId operation) {
  impl_->checkedLoop("close");
  impl_->close(operation);
}

void TcpNetwork::pace(int32_t peer, int64_t bytes_per_s) {
  impl_->checkedLoop("pace");
  impl_->pace(peer, bytes_per_s);
}

void TcpNetwork::sendControl(int32_t peer, std::string message) {
  impl_->checkedLoop("sendControl");
  impl_->sendControl(peer, message);
}

uint64_t TcpNetwork::startTimer(std::chrono::milliseconds delay, std::function<void()> task) {
  return impl_->checkedLoop("startTimer").startTimer(delay, std::move(task));
}

void TcpNetwork::cancelTimer(uint64_t timer) { impl_->checkedLoop("cancelTimer").cancelTimer(timer); }

void TcpNetwork::setAddress(int32_t peer, std::string address) {
  impl_->checkedLoop("setAddress");
  impl_->setAddress(peer, address);
}

void TcpNetwork::forget(int32_t peer) {
  impl_->checkedLoop("forget");
  impl_->forget(peer);
}

bool TcpNetwork::hasAddress(int32_t peer) const {
  impl_->checkedLoop("hasAddress");
  return impl_->hasAddress(peer);
}

}  // namespace xmesh::transport
