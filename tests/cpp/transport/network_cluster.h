#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "transport/fakes/fake_host_network.h"
#include "transport/peer_network.h"
#include "transport/tcp/network.h"

namespace xmesh::transport::test {

/// What one rank was told. Guarded by its Monitor.
struct Told {
  struct Loss {
    int32_t peer = 0;
    std::string reason;
    bool is_goodbye = false;
  };
  std::map<OperationId, std::vector<int64_t>> sent;      ///< cookies in order
  std::map<OperationId, std::vector<int64_t>> received;  ///< cookies in order
  std::vector<int64_t> received_of_all;                  ///< of all operations
  std::vector<std::pair<int32_t, std::string>> controls;
  std::vector<Loss> losses;
};

/// One lock for everything that the ranks of a test are told.
struct Monitor {
  std::mutex mutex;
  std::condition_variable changed;
};

/// Writes down what a rank is told.
class Recorder final : public PeerEvents {
 public:
  explicit Recorder(Monitor& monitor) : monitor_(monitor) {}
  void onControl(int32_t peer, std::string message) override;
  void onPeerLost(int32_t peer, const std::string& reason, bool is_goodbye) override;
  OperationEvents& operation(OperationId operation);

  Told told;

 private:
  class Operation;
  Monitor& monitor_;
  std::map<OperationId, std::unique_ptr<OperationEvents>> operations_;
};

/// Some ranks of one kind of network, each reachable from the others.
class Cluster {
 public:
  virtual ~Cluster() = default;
  virtual int32_t size() const = 0;
  virtual PeerNetwork& network(int32_t rank) = 0;
  /// Runs `task` on the rank's network thread; returns when it has run.
  virtual void call(int32_t rank, const std::function<void()>& task) = 0;
  /// Until `done`, looked at under the monitor's lock. False when it cannot come (or after a minute, which no test should need).
  virtual bool waitFor(const std::function<bool()>& done) = 0;
  /// The rank leaves in order.
  virtual void leave(int32_t rank) = 0;
  virtual Recorder& recorder(int32_t rank) = 0;

  Told& told(int32_t rank) { return recorder(rank).told; }
  void open(int32_t rank, OperationId operation);
  void close(int32_t rank, OperationId operation);
  void send(int32_t rank, OperationId operation, int32_t peer, const std::vector<char>& data, int64_t cookie);
  void recv(int32_t rank, OperationId operation, int32_t peer, std::vector<char>& data, int64_t cookie);
  void control(int32_t rank, int32_t peer, const std::string& message);
  /// Everything that `from` had said to `to` on its connection before has arrived when this returns.
  bool fence(int32_t from, int32_t to);
  /// Both ways, one after the other.
  bool fenceBoth(int32_t a, int32_t b) { return fence(a, b) && fence(b, a) && fence(a, b); }

 private:
  int num_fences_ = 0;
};

class FakeCluster final : public Cluster {
 public:
  FakeCluster(int32_t size, uint64_t seed);
  int32_t size() const override { return static_cast<int32_t>(endpoints_.size()); }
  PeerNetwork& network(int32_t rank) override { return *endpoints_[static_cast<size_t>(rank)]; }
  void call(int32_t rank, const std::function<void()>& task) override;
  bool waitFor(const std::function<bool()>& done) override { return network_.runUntil(done); }
  void leave(int32_t rank) override { endpoints_[static_cast<size_t>(rank)].reset(); }
  Recorder& recorder(int32_t rank) override { return *recorders_[static_cast<size_t>(rank)]; }
  FakeHostNetwork& fake() { return network_; }

 private:
  Monitor monitor_;
  std::vector<std::unique_ptr<Recorder>> recorders_;
  FakeHostNetwork network_;
  std::vector<std::unique_ptr<PeerNetwork>> endpoints_;
};

class TcpCluster final : public Cluster {
 public:
  /// `unwilling` is a rank that shares no memory.
  explicit TcpCluster(int32_t size, const TcpNetworkOptions& options = {}, int32_t unwilling = -1);
  int32_t size() const override { return static_cast<int32_t>(networks_.size()); }
  TcpNetwork& network(int32_t rank) override { return *networks_[static_cast<size_t>(rank)]; }
  void call(int32_t rank, const std::function<void()>& task) override;
  bool waitFor(const std::function<bool()>& done) override;
  void leave(int32_t rank) override { networks_[static_cast<size_t>(rank)].reset(); }
  Recorder& recorder(int32_t rank) override { return *recorders_[static_cast<size_t>(rank)]; }

 private:
  Monitor monitor_;
  std::vector<std::unique_ptr<Recorder>> recorders_;
  std::vector<std::unique_ptr<TcpNetwork>> networks_;
};

/// Bytes that depend on the seed.
std::vector<char> randomBytes(size_t num_bytes, uint64_t seed);

}  // namespace xmesh::transport::test
