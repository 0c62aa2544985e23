#include "c10d/link.h"

#include <algorithm>
#include <random>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "c10d/life_lines.h"
#include "c10d/stores.h"
#include "core/error.h"
#include "runtime/interrupts.h"
#include "runtime/link/messages.h"
#include "transport/local_address.h"

namespace xmesh::c10d_backend {
namespace {

using runtime::link::Attempt;
using runtime::link::Node;
using runtime::link::Party;

constexpr std::chrono::milliseconds kLook{50};  ///< at the store, for those who are not there yet, and at signals
constexpr int kLooksWithoutStore = 20;          ///< that are not made once the store has failed
constexpr int kLooksWithSource = 20;            ///< between two looks for another source than the one that is there

/// Without the stack that torch puts behind it.
std::string whatOf(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch != nullptr ? of_torch->what_without_backtrace() : error.what();
}

uint64_t randomNumber() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

/// A number that nobody had before in this store.
int32_t takeNumber(::c10d::Store& store) {
  while (true) {
    const auto number = static_cast<int32_t>(randomNumber() & 0x7fffffffU);
    const std::string mine = std::to_string(randomNumber());
    if (textOf(store.compareSet("number/" + std::to_string(number), {}, bytesOf(mine))) == mine) {
      return number;
    }
  }
}

/// "number address" of a leader.
std::string recordOf(const runtime::link::Member& leader) { return std::to_string(leader.number) + " " + leader.address; }

std::pair<int32_t, std::string> readRecord(const std::string& record) {
  const size_t space = record.find(' ');
  return {std::stoi(record.substr(0, space)), record.substr(space + 1)};
}

std::string leaderKey(bool is_source, const std::string& replica) { return is_source ? "source/leader" : "replica/" + replica + "/leader"; }

}  // namespace

/// Hears the network for the node and the service, and the node for the link. The network's thread.
class Link::Events final : public transport::PeerEvents, public runtime::link::NodeEvents {
 public:
  explicit Events(Link& link) : link_(link) {}
  transport::PeerEvents& listen(transport::PeerEvents& service) {
    service_ = &service;
    return *this;
  }
  void start(Node::Options options, transport::ControlNetwork& network, int32_t leader) {
    node = std::make_unique<Node>(std::move(options), network, *this);
    node->enter(leader);
    for (const auto& [peer, message] : std::exchange(early_, {})) {
      node->hear(peer, message);
    }
  }
  void onControl(int32_t peer, std::string message) override {
    if (!runtime::link::isLinkMessage(message)) {
      service_->onControl(peer, std::move(message));
    } else if (node != nullptr) {
      node->hear(peer, message);
    } else {
      early_.emplace_back(peer, std::move(message));
    }
  }
  void onPeerLost(int32_t peer, const std::string& reason, bool is_goodbye) override {
    service_->onPeerLost(peer, reason, is_goodbye);
    if (node != nullptr) {
      node->lose(peer, reason);
    }
  }

  std::unique_ptr<Node> node;

 private:
  template <typename Change>
  void change(const Change& change) {
    const std::lock_guard lock(link_.mutex_);
    change();
    link_.changed_.notify_all();
  }
  void onFormed(const Party& own) override {
    change([&] {
      link_.is_formed_ = true;
      link_.replica_of_[own.number] = own.replica;
    });
  }
  void onKnown(const Party& party) override {
    change([&] {
      link_.replica_of_[party.number] = party.replica;
      link_.has_source_ = link_.has_source_ || party.is_source;
    });
  }
  void onForgotten(uint64_t /*party*/) override {}
  void onOffer(const Attempt& attempt, const std::vector<Party>& parties) override {
    link_.postTask([this, attempt, parties] { link_.offer(attempt, parties); });
  }
  void onGo(const Attempt& attempt) override {
    link_.postTask([this, attempt] { link_.go(attempt); });
  }
  void onAbort(const Attempt& attempt) override { link_.mover_->abort(attempt); }
  void onHeld(uint64_t version) override {
    change([&] { link_.held_ = std::max(link_.held_, version); });
  }
  void onSettled(const runtime::link::Settlement& settlement) override {
    change([&] {
      link_.publishing_ = 0;
      PublishedVersion& version = link_.settled_[settlement.version];
      version.error = settlement.error;
      version.left_out = settlement.left_out;
      for (const uint64_t holder : settlement.holders) {
        version.replicas.push_back(link_.replica_of_[holder]);
      }
      std::sort(version.replicas.begin(), version.replicas.end());
    });
  }
  void onSwapped(uint64_t count, uint64_t version, uint64_t newest) override {
    change([&] {
      link_.swapped_[count] = version;
      link_.passed_ = newest;
    });
  }
  void onLeftOut(const std::string& /*why*/) override {}
  void onBroken(const std::string& why) override {
    change([&] {
      if (link_.is_formed_ || link_.options_.rank == 0) {
        link_.broken_ = why;
      }  // else the leader of an earlier life of this party, whose record was still there
    });
  }
  void onSourceLost(const std::string& /*why*/) override {
    change([&] { link_.has_source_ = false; });
  }

  Link& link_;
  transport::PeerEvents* service_ = nullptr;
  std::vector<std::pair<int32_t, std::string>> early_;
};

Link::Link(c10::intrusive_ptr<::c10d::Store> store, LinkOptions options)
    : store_(c10::make_intrusive<::c10d::PrefixStore>("xmesh/link", ownClient(store))),
      options_(std::move(options)),
      events_(std::make_shared<Events>(*this)) {
  core::require(options_.rank >= 0 && options_.rank < options_.size,
                "rank " + std::to_string(options_.rank) + " is not one of " + std::to_string(options_.size));
  EndpointOptions endpoint;
  endpoint.staging_bytes = options_.staging_bytes;
  endpoint.shared_memory = options_.shared_memory;
  endpoint.token = agreeOnToken(*store_);
  endpoint.listen_host = transport::localAddress(storeHost(store));
  endpoint.listener = [events = events_](transport::PeerEvents& service) -> transport::PeerEvents& { return events->listen(service); };
  number_ = takeNumber(*store_);
  const auto no_communicator = [](c10::Device device, const std::string&, int, const std::vector<int64_t>&) -> c10::intrusive_ptr<::c10d::Backend> {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "xmesh: nothing in a link carries tensors on ", device);
  };
  endpoint_ = std::make_shared<Endpoint>(runtime::RankNumbers(), number_, options_.deadline, std::move(endpoint),
                                         std::make_shared<DeviceLines>(no_communicator, randomNumber()));
  self_ = {number_, endpoint_->service().address(), options_.host_id.empty() ? transport::hostIdentity() : options_.host_id, {}};
}

Link::~Link() { close(); }

void Link::onNode(std::function<void(Node&)> task) {
  endpoint_->service().post([events = events_, task = std::move(task)](transport::ControlNetwork& /*network*/) {
    if (events->node != nullptr) {
      task(*events->node);
    }
  });
}

void Link::postTask(Task task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  changed_.notify_all();
}

void Link::enter(core::Manifest manifest, LocalWeights weights) {
  std::string text = core::manifestToJson(manifest);
  auto mover = std::make_unique<WeightMover>(endpoint_, std::move(manifest), std::move(weights), options_.wave_bytes);
  const std::lock_guard lock(mutex_);
  core::require(!has_entered_ && !is_closing_, "a link is entered once");
  has_entered_ = true;
  self_.manifest = std::move(text);
  mover_ = std::move(mover);
  thread_ = std::thread([this] { run(); });
}

/// The link's thread: what the node asks for, and meanwhile those who are not there yet.
void Link::run() {
  std::unique_lock lock(mutex_);
  while (!is_closing_) {
    if (tasks_.empty()) {
      lock.unlock();
      try {
        if (looks_to_skip_ > 0) {
          --looks_to_skip_;
        } else {
          seek();
        }
      } catch (const std::exception&) {
        looks_to_skip_ = kLooksWithoutStore;  // it is gone: who is known, stays
      }
      lock.lock();
      changed_.wait_for(lock, kLook, [this] { return is_closing_ || !tasks_.empty(); });
      continue;
    }
    const Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    lock.lock();
  }
}

void Link::seek() {
  bool is_formed = false;
  bool has_source = false;
  {
    const std::lock_guard lock(mutex_);
    if (!broken_.empty()) {
      return;
    }
    is_formed = is_formed_;
    has_source = has_source_;
  }
  if (!is_formed) {
    seekLeader();
  } else if (options_.rank == 0 && !options_.is_source && (!has_source || ++num_looks_ % kLooksWithSource == 0)) {
    seekSource();
  }
  if (is_formed && options_.rank == 0 && options_.is_source && source_record_.empty()) {
    source_record_ = recordOf(self_);
    store_->set("source", bytesOf(source_record_));  // for replicas, now that it is formed
  }
}

void Link::seekLeader() {
  std::string record;
  const std::string key = leaderKey(options_.is_source, options_.replica);
  if (options_.rank == 0) {
    record = recordOf(self_);
    if (leader_record_.empty()) {
      store_->set(key, bytesOf(record));
    }
  } else if (store_->check({key})) {
    record = textOf(store_->get(key));
  }
  if (record.empty() || record == leader_record_) {
    return;
  }
  leader_record_ = record;
  const auto [leader, address] = readRecord(record);
  Node::Options node;
  node.self = self_;
  node.is_source = options_.is_source;
  node.replica = options_.replica;
  node.rank = options_.rank;
  node.size = options_.size;
  node.party = randomNumber() | 1U;
  node.deadline = options_.deadline;
  endpoint_->service().post([events = events_, node, leader = leader, address = address](transport::ControlNetwork& network) {
    if (leader != node.self.number) {
      network.setAddress(leader, address);
    }
    events->start(node, network, leader);
  });
}

void Link::seekSource() {
  if (!store_->check({"source"})) {
    return;
  }
  const std::string record = textOf(store_->get("source"));
  if (record == source_record_) {
    return;
  }
  source_record_ = record;
  const auto [leader, address] = readRecord(record);
  {
    const std::lock_guard lock(mutex_);
    has_source_ = true;
  }
  endpoint_->service().post([events = events_, leader = leader, address = address](transport::ControlNetwork& network) {
    network.setAddress(leader, address);
    events->node->meet(leader);
  });
}

void Link::offer(const Attempt& attempt, const std::vector<Party>& parties) {
  offered_.reset();
  try {
    std::vector<uint64_t> numbers;
    for (const Party& party : parties) {
      numbers.push_back(party.number);
    }
    if (plan_ == nullptr || numbers != planned_for_) {
      plan_ = mover_->plan(parties);
      planned_for_ = numbers;
    }
    offered_ = attempt;
    onNode([attempt, fingerprint = plan_->fingerprint()](Node& node) { node.accept(attempt, fingerprint); });
  } catch (const MisfitError& error) {
    onNode([attempt, why = std::string(error.what()), misfits = error.members()](Node& node) { node.done(attempt, false, why, misfits); });
  } catch (const std::exception& error) {
    onNode([attempt, why = whatOf(error)](Node& node) { node.done(attempt, false, why); });
  }
}

void Link::go(const Attempt& attempt) {
  if (offered_ != attempt) {
    return;  // another has been offered since
  }
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_closing_ || !is_swapping_; });
    if (is_closing_) {
      return;
    }
  }
  std::string why;
  std::vector<int32_t> blamed;
  try {
    mover_->move(*plan_, attempt, options_.deadline);
  } catch (const runtime::PeerError& error) {
    why = error.what();
    blamed.assign(error.globalRanks().begin(), error.globalRanks().end());
  } catch (const std::exception& error) {
    why = whatOf(error);
  }
  onNode([attempt, why, blamed](Node& node) { node.done(attempt, why.empty(), why, blamed); });
}

void Link::checkWhole() const {
  if (!broken_.empty()) {
    throw runtime::PeerError(broken_, {});
  }
  if (is_closing_) {
    throw runtime::GroupError("the link is closed");
  }
}

bool Link::waitFor(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds timeout, const std::function<bool()>& done) {
  if (is_closing_) {
    throw runtime::GroupError("the link is closed");
  }
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!done()) {
    checkWhole();
    if (timeout.count() > 0 && std::chrono::steady_clock::now() >= deadline) {
      return false;
    }
    changed_.wait_for(lock, kLook);
    lock.unlock();
    runtime::checkInterrupts();
    lock.lock();
  }
  return true;
}

void Link::publish(uint64_t version) {
  std::unique_lock lock(mutex_);
  core::require(options_.is_source && has_entered_, "only a source that has entered publishes");
  waitFor(lock, std::chrono::milliseconds(0), [this] { return is_formed_; });
  core::require(publishing_ == 0, "version " + std::to_string(publishing_) + " is still being published");
  core::require(version > 0, "versions begin at 1");
  publishing_ = version;
  settled_.clear();
  lock.unlock();
  onNode([version](Node& node) { node.publish(version); });
}

bool Link::waitSettled(uint64_t version, std::chrono::milliseconds timeout, PublishedVersion& out) {
  std::unique_lock lock(mutex_);
  if (!waitFor(lock, timeout, [&] { return settled_.contains(version); })) {
    return false;
  }
  out = settled_.at(version);
  settled_.erase(version);
  return true;
}

uint64_t Link::receive(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return waitFor(lock, timeout, [&] { return held_ > passed_; }) ? held_ : 0;
}

uint64_t Link::swap() {
  std::unique_lock lock(mutex_);
  core::require(!options_.is_source && has_entered_, "only a replica that has entered takes versions up");
  waitFor(lock, std::chrono::milliseconds(0), [this] { return is_formed_; });
  is_swapping_ = true;
  const uint64_t count = ++num_swaps_;
  lock.unlock();
  onNode([](Node& node) { node.swap(); });
  lock.lock();
  try {
    waitFor(lock, std::chrono::milliseconds(0), [&] { return swapped_.contains(count); });
  } catch (const std::exception&) {
    if (!lock.owns_lock()) {
      lock.lock();
    }
    is_swapping_ = false;
    broken_ = broken_.empty() ? "swap() was interrupted: this rank does not know which version the others took up" : broken_;
    changed_.notify_all();
    throw;
  }
  const uint64_t version = swapped_.at(count);
  swapped_.erase(count);
  return version;
}

void Link::resume() {
  const std::lock_guard lock(mutex_);
  is_swapping_ = false;
  changed_.notify_all();
}

bool Link::hasSource() {
  const std::lock_guard lock(mutex_);
  return has_source_;
}

void Link::close() noexcept {
  if (!fork_.isHere()) {
    if (thread_.joinable()) {
      thread_.detach();
    }
    endpoint_->close(true);
    return;
  }
  std::call_once(closed_, [this] {
    {
      const std::lock_guard lock(mutex_);
      is_closing_ = true;
      changed_.notify_all();
    }
    endpoint_->close(/*abort=*/true);  // ends what the link's thread waits for
    if (thread_.joinable()) {
      thread_.join();
    }
  });
}

}  // namespace xmesh::c10d_backend
