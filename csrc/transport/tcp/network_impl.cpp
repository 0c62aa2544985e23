#include "transport/tcp/network_impl.h"

#include <cstdio>
#include <stdexcept>

namespace xmesh::transport {
namespace {

constexpr std::chrono::milliseconds kGoodbyeTimeout{1000};
constexpr std::chrono::milliseconds kLastWordTimeout{5000};
constexpr int kRoundsPerTurn = 4;

void writeToStderr(const std::string& line) { std::fprintf(stderr, "torch_xmesh: %s\n", line.c_str()); }

}  // namespace

TcpNetwork::Impl::Impl(TcpNetworkOptions options, PeerEvents& events)
    : options_(std::move(options)),
      peer_events_(events),
      loop_([this] { return turnEnd(); }, [this](const std::string& what) { log("a callback failed: " + what); }) {
  if (options_.own_peer < 0 || options_.most_peers < 0) {
    throw std::invalid_argument("a peer's number is not negative, nor is how many there are; got " + std::to_string(options_.own_peer) + " of " +
                                std::to_string(options_.most_peers));
  }
  listener_ = std::make_unique<TcpListener>(loop_, options_.listen_host, hello(), options_.handshake_timeout, options_.most_peers,
                                            TcpListener::Events{[this](int32_t rank, Fd fd) { onIncoming(rank, std::move(fd)); },
                                                                [this](const std::string& reason) { onRejected(reason); }});
  address_ = listener_->address();
  listener_->start();
  loop_.start();
}

TcpNetwork::Impl::~Impl() {
  loop_.post([this] { sayGoodbye(); });
  loop_.join();
}

Hello TcpNetwork::Impl::hello() const { return {static_cast<uint32_t>(options_.own_peer), options_.token}; }

EventLoop& TcpNetwork::Impl::checkedLoop(const char* call) {
  if (!loop_.onThread()) {
    throw std::logic_error(std::string("TcpNetwork::") + call + " called outside the network's thread");
  }
  return loop_;
}

TcpNetwork::Impl::Peer& TcpNetwork::Impl::peerAt(int32_t peer) {
  if (peer < 0 || peer == options_.own_peer) {
    throw std::invalid_argument(std::to_string(peer) + " is no peer of " + std::to_string(options_.own_peer));
  }
  return peers_[peer];
}

TcpSender& TcpNetwork::Impl::senderTo(int32_t rank) {
  Peer& peer = peerAt(rank);
  if (!peer.sender) {
    peer.sender = std::make_unique<TcpSender>(loop_, *this, rank, hello(), options_.shared_memory);
    peer.sender->pace(peer.pacing_rate);
  }
  return *peer.sender;
}

TcpReceiver& TcpNetwork::Impl::receiverFrom(int32_t rank) {
  Peer& peer = peerAt(rank);
  if (!peer.receiver) {
    peer.receiver = std::make_unique<TcpReceiver>(loop_, *this, rank, options_.own_peer, options_.shared_memory);
  }
  return *peer.receiver;
}

void TcpNetwork::Impl::startConnection(int32_t rank, const char* call) {
  const Peer& peer = peerAt(rank);
  if (!peer.address) {
    throw std::logic_error(std::string("TcpNetwork::") + call + ": the address of rank " + std::to_string(rank) + " is not set");
  }
  senderTo(rank).connect(*peer.address, options_.connect_timeout, options_.refused_timeout);
  wantFlush(rank);
}

OperationTable::Open& TcpNetwork::Impl::openOperation(OperationId operation, const char* call) {
  OperationTable::Open* found = operations_.find(operation);
  if (found == nullptr) {
    throw std::logic_error(std::string("TcpNetwork::") + call + ": operation " + operation.str() + " is not open");
  }
  return *found;
}

void TcpNetwork::Impl::open(OperationId operation, OperationEvents& events) {
  if (operations_.find(operation) != nullptr || operations_.wasClosed(operation)) {
    throw std::logic_error("TcpNetwork::open: operation " + operation.str() + " has been opened before");
  }
  for (const auto& [peer, count] : operations_.open(operation, events)) {
    onReadyFrame(peer, operation, count);
  }
}

void TcpNetwork::Impl::send(OperationId operation, int32_t peer, const void* data, int64_t num_bytes, int64_t cookie) {
  OperationTable::Open& open = openOperation(operation, "send");
  if (peerAt(peer).is_lost) {
    return;
  }
  startConnection(peer, "send");
  operations_.touch(open, peer);
  senderTo(peer).queueData(operation, data, num_bytes, cookie);
}

void TcpNetwork::Impl::recv(OperationId operation, int32_t peer, void* data, int64_t num_bytes, int64_t cookie) {
  OperationTable::Open& open = openOperation(operation, "recv");
  if (peerAt(peer).is_lost) {
    return;
  }
  startConnection(peer, "recv");
  operations_.touch(open, peer);
  senderTo(peer).queueReady(operation, receiverFrom(peer).post(operation, data, num_bytes, cookie));
}

void TcpNetwork::Impl::close(OperationId operation) {
  const OperationTable::Open* open = operations_.find(operation);
  if (open == nullptr) {
    return;
  }
  for (const int32_t rank : open->peers) {
    const Peer& peer = peerAt(rank);
    if (peer.sender) {
      peer.sender->forget(operation);
    }
    if (peer.receiver) {
      peer.receiver->forget(operation);
    }
  }
  operations_.close(operation);
}

void TcpNetwork::Impl::pace(int32_t peer, int64_t bytes_per_s) {
  peerAt(peer).pacing_rate = bytes_per_s;
  senderTo(peer).pace(bytes_per_s);
}

void TcpNetwork::Impl::sendControl(int32_t peer, const std::string& message) {
  if (static_cast<int64_t>(message.size()) > kMaxControlBytes) {
    throw std::invalid_argument("a control message of " + std::to_string(message.size()) + " bytes exceeds the limit of " +
                                std::to_string(kMaxControlBytes));
  }
  if (!peerAt(peer).is_lost) {
    startConnection(peer, "sendControl");
    senderTo(peer).queueControl(message);
  }
}

void TcpNetwork::Impl::setAddress(int32_t peer, const std::string& address) { peerAt(peer).address = SocketAddress::parse(address); }

void TcpNetwork::Impl::forget(int32_t peer) {
  Peer& known = peerAt(peer);
  if (known.is_lost) {
    known.sender.reset();
    known.receiver.reset();
  }
}

bool TcpNetwork::Impl::hasAddress(int32_t peer) { return peerAt(peer).address.has_value(); }

void TcpNetwork::Impl::onIncoming(int32_t rank, Fd fd) {
  if (peerAt(rank).is_lost || receiverFrom(rank).isAttached()) {
    onRejected("dropped a connection to " + address_ + ": rank " + std::to_string(rank) +
               (peerAt(rank).is_lost ? " is gone" : " is connected already"));
    return;
  }
  receiverFrom(rank).attach(std::move(fd));
}

void TcpNetwork::Impl::onRejected(const std::string& reason) {
  if (num_rejected_.fetch_add(1) == 0) {
    log(reason + " (further ones are only counted)");
  }
}

void TcpNetwork::Impl::log(const std::string& line) {
  const std::string text = "rank " + std::to_string(options_.own_peer) + ": " + line;
  options_.log ? options_.log(text) : writeToStderr(text);
}

void TcpNetwork::Impl::onControlFrame(int32_t peer, std::string message) {
  events_due_.push_back({Event::Kind::kControl, 0, 0, peer, std::move(message)});
}

void TcpNetwork::Impl::onReadyFrame(int32_t peer, OperationId operation, int64_t count) {
  OperationTable::Open* open = operations_.find(operation);
  if (open != nullptr) {
    operations_.touch(*open, peer);
    senderTo(peer).grant(operation, count);
    wantFlush(peer);
  } else if (!operations_.wasClosed(operation)) {
    operations_.rememberCredit(operation, peer, count);
  }
}

void TcpNetwork::Impl::onRingTaken(int32_t peer, int64_t num_bytes) {
  if (is_closing_) {
    return;
  }
  senderTo(peer).queueRingTaken(num_bytes);
  wantFlush(peer);
}

bool TcpNetwork::Impl::onRingTakenFrame(int32_t peer, int64_t num_bytes) {
  wantFlush(peer);
  return senderTo(peer).onPeerTook(num_bytes);
}

void TcpNetwork::Impl::onGoodbyeFrame(int32_t rank, bool is_final) {
  if (is_final) {
    losePeer(rank, Event::Kind::kGoodbye, "rank " + std::to_string(rank) + " said goodbye");
  } else {
    peerAt(rank).has_parted = true;
  }
}

void TcpNetwork::Impl::onBroken(int32_t rank, Direction direction, const std::string& reason) {
  Peer& peer = peerAt(rank);
  if (direction == Direction::kOutgoing && peer.has_parted && !is_closing_) {
    // The connection to the leaving rank is gone, but what it said on its own may not have been read yet.
    peer.has_parted = false;
    peer.sender->stop();
    loop_.startTimer(kLastWordTimeout, [this, rank, reason] { losePeer(rank, Event::Kind::kLost, reason); });
    return;
  }
  if (direction == Direction::kIncoming && peer.sender) {
    peer.sender->readReverse();  // the peer may have said why
  }
  losePeer(rank, Event::Kind::kLost, reason);
}

void TcpNetwork::Impl::losePeer(int32_t rank, Event::Kind kind, const std::string& reason) {
  Peer& peer = peerAt(rank);
  if (peer.sender) {
    peer.sender->stop();
  }
  if (peer.receiver) {
    peer.receiver->stop();
  }
  if (!std::exchange(peer.is_lost, true) && !is_closing_) {
    events_due_.push_back({kind, 0, 0, rank, reason});
  }
}

/// While this rank leaves, others may be leaving too: those that keep their own connection to it are not.
bool TcpNetwork::Impl::mayStillListen(int32_t rank) const {
  const Peer& peer = peers_.at(rank);
  return !is_closing_ || (peer.receiver && peer.receiver->isAttached());
}

void TcpNetwork::Impl::wantFlush(int32_t rank) {
  Peer& peer = peerAt(rank);
  if (!std::exchange(peer.wants_flush, true)) {
    flush_due_.push_back(rank);
  }
}

void TcpNetwork::Impl::dispatch(Event& event) {
  switch (event.kind) {
    case Event::Kind::kSent:
    case Event::Kind::kReceived:
      if (const OperationTable::Open* open = operations_.find(event.operation)) {
        event.kind == Event::Kind::kSent ? open->events->onSent(event.cookie) : open->events->onReceived(event.cookie);
      }
      break;
    case Event::Kind::kControl:
      peer_events_.onControl(event.peer, std::move(event.text));
      break;
    case Event::Kind::kLost:
    case Event::Kind::kGoodbye:
      peer_events_.onPeerLost(event.peer, event.text, event.kind == Event::Kind::kGoodbye);
      break;
  }
}

void TcpNetwork::Impl::dispatchDue() {
  if (is_closing_) {
    events_due_.clear();
  }
  for (size_t left = events_due_.size(); left > 0 && !events_due_.empty(); --left) {
    Event event = std::move(events_due_.front());
    events_due_.pop_front();
    try {
      dispatch(event);
    } catch (const std::exception& error) {
      log(std::string("a callback failed: ") + error.what());
    } catch (...) {
      log("a callback failed");
    }
  }
}

/// Callbacks, then writes; what one turn may do is bounded, so that sockets and tasks get their turn too.
bool TcpNetwork::Impl::turnEnd() {
  bool has_more = false;
  for (int round = 0; round < kRoundsPerTurn && !has_more && !(events_due_.empty() && flush_due_.empty()); ++round) {
    dispatchDue();
    has_more = flushPeers();
  }
  checkDrains();
  if (is_closing_ && isDrained()) {
    loop_.stop();
  }
  return has_more || !events_due_.empty() || !flush_due_.empty();
}

bool TcpNetwork::Impl::flushPeers() {
  bool has_more = false;
  for (const int32_t rank : std::exchange(flush_due_, {})) {
    Peer& peer = peerAt(rank);
    peer.wants_flush = false;
    try {
      if (peer.sender && peer.sender->flush()) {
        wantFlush(rank);
        has_more = true;
      }
    } catch (const std::exception& error) {
      losePeer(rank, Event::Kind::kLost, "cannot send to rank " + std::to_string(rank) + ": this rank failed (" + error.what() + ")");
    }
  }
  return has_more;
}

bool TcpNetwork::Impl::isDrained() const {
  for (const auto& [number, peer] : peers_) {
    if (peer.sender && peer.sender->hasQueued()) {
      return false;
    }
  }
  return true;
}

void TcpNetwork::Impl::checkDrains() {
  if (!drains_.empty() && isDrained()) {
    for (const Drain& drain : std::exchange(drains_, {})) {
      loop_.cancelTimer(drain.timer);
      drain.result->set_value(true);
    }
  }
}

bool TcpNetwork::Impl::drain(std::chrono::milliseconds timeout) {
  if (loop_.onThread() || ::getpid() != pid_) {
    throw std::logic_error("TcpNetwork::drain called on the network's thread or in a forked child");
  }
  auto result = std::make_shared<std::promise<bool>>();
  loop_.post([this, result, timeout] {
    if (isDrained()) {
      result->set_value(true);
      return;
    }
    const uint64_t timer = loop_.startTimer(timeout, [this, result] {
      std::erase_if(drains_, [&](const Drain& drain) { return drain.result == result; });
      result->set_value(false);
    });
    drains_.push_back({result, timer});
  });
  return result->get_future().get();
}

void TcpNetwork::Impl::sayGoodbye() {
  is_closing_ = true;
  listener_.reset();
  std::vector<OperationId> open;
  for (const auto& [operation, state] : operations_.all()) {
    open.push_back(operation);
  }
  for (const OperationId operation : open) {
    close(operation);
  }
  events_due_.clear();
  for (auto& [number, peer] : peers_) {
    const bool owes_goodbye = peer.sender && peer.sender->owesGoodbye();
    if (peer.receiver && peer.receiver->isAttached()) {
      std::string frame;
      appendFrame({FrameKind::kGoodbye, 0, owes_goodbye ? kGoodbyeOtherway : kGoodbyeFinal, 0}, "", frame);
      peer.receiver->sayBack(frame);
    }
    if (owes_goodbye) {
      peer.sender->queueGoodbye();
      wantFlush(number);
    } else if (peer.sender) {
      peer.sender->stop();
    }
  }
  loop_.startTimer(kGoodbyeTimeout, [this] { loop_.stop(); });
}

}  // namespace xmesh::transport
