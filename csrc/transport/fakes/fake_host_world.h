#pragma once

#include <chrono>
#include <compare>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "transport/peer_network.h"

namespace xmesh::transport {

/// The scheduler and the wires behind FakeHostNetwork. What can happen lies in queues, each first in first out and bound to the rank on which it
/// happens; the scheduler picks a random queue.
class FakeHostWorld {
 public:
  FakeHostWorld(int32_t num_ranks, uint64_t seed);

  int32_t numRanks() const { return static_cast<int32_t>(ranks_.size()); }
  bool step();
  /// Moves the clock to the next timer that is due until `limit`; false when there is none.
  bool fireNextTimer(std::chrono::milliseconds limit);
  std::chrono::milliseconds now() const { return now_; }
  void setNow(std::chrono::milliseconds now) { now_ = now; }

  void join(int32_t rank, PeerEvents& events);
  /// The rank is gone: killed, or with a goodbye.
  void leave(int32_t rank, bool is_goodbye);
  void setStopped(int32_t rank, bool is_stopped);
  bool isAlive(int32_t rank) const { return rankAt(rank).is_alive; }

  // What the endpoints ask for. post() may be called from any thread.
  void post(int32_t rank, std::function<void()> task);
  void open(int32_t rank, OperationId operation, OperationEvents& events);
  void send(int32_t rank, OperationId operation, int32_t peer, const void* data, int64_t num_bytes, int64_t cookie);
  void recv(int32_t rank, OperationId operation, int32_t peer, void* data, int64_t num_bytes, int64_t cookie);
  void close(int32_t rank, OperationId operation);
  void sendControl(int32_t rank, int32_t peer, std::string message);
  uint64_t startTimer(int32_t rank, std::chrono::milliseconds delay, std::function<void()> task);
  void cancelTimer(uint64_t timer) { timers_alive_.erase(timer); }
  void setAddress(int32_t rank, int32_t peer, const std::string& address);
  bool hasAddress(int32_t rank, int32_t peer) const { return rankAt(rank).addresses.contains(peer); }

 private:
  struct Rank {
    PeerEvents* events = nullptr;
    bool has_joined = false;
    bool is_alive = false;
    bool is_stopped = false;
    bool said_goodbye = false;
    std::map<OperationId, OperationEvents*> operations;
    std::set<OperationId> closed;
    std::map<int32_t, std::string> addresses;
    std::set<int32_t> contacts;  ///< peers with whom anything was ever exchanged
    std::set<int32_t> noticed;   ///< contacts of whose loss a notice is on its way
    std::set<int32_t> lost;      ///< and has arrived
  };
  enum class QueueKind { kPost, kTimer, kControl, kDepart, kArrive };
  struct QueueKey {
    QueueKind kind = QueueKind::kPost;
    int32_t rank = 0;  ///< where it happens
    int32_t peer = 0;
    OperationId id;  ///< names a message; a timer's number is in its call
    auto operator<=>(const QueueKey&) const = default;
  };
  struct Message {
    char* data = nullptr;
    int64_t num_bytes = 0;
    int64_t cookie = 0;
  };
  struct StreamKey {
    OperationId operation;
    int32_t src = 0;
    int32_t dst = 0;
    auto operator<=>(const StreamKey&) const = default;
  };
  /// A matched pair of send and recv on its way.
  struct MatchedMessage {
    StreamKey key;
    Message from;
    Message to;
    int64_t departed_bytes = 0;
    int64_t arrived_bytes = 0;
    bool is_aborted = false;    ///< by the sender
    bool is_discarded = false;  ///< by the receiver
  };
  struct Stream {
    std::deque<Message> sends;
    std::deque<Message> recvs;
    std::shared_ptr<MatchedMessage> matched;
  };

  const Rank& rankAt(int32_t rank) const { return ranks_.at(static_cast<size_t>(rank)); }
  Rank& rankAt(int32_t rank) { return ranks_.at(static_cast<size_t>(rank)); }
  bool mayRun(int32_t rank) const { return rankAt(rank).is_alive && !rankAt(rank).is_stopped; }
  void push(const QueueKey& key, std::function<void()> what);
  void takePosted();
  OperationEvents& checkMessage(int32_t rank, OperationId operation, int32_t peer, const char* call);
  void checkPeer(int32_t rank, int32_t peer, const char* call) const;
  void meet(int32_t rank, int32_t peer);
  void notifyLoss(int32_t rank, int32_t lost, const std::string& reason, bool is_goodbye);
  void match(const StreamKey& key);
  void depart(const std::shared_ptr<MatchedMessage>& matched);
  void arrive(const std::shared_ptr<MatchedMessage>& matched, const std::string& piece, bool is_last);
  void dropStreams(int32_t rank, const std::function<bool(OperationId)>& which);

  std::vector<Rank> ranks_;
  std::mt19937_64 random_;
  std::map<QueueKey, std::deque<std::function<void()>>> queues_;  ///< none is empty
  std::map<StreamKey, Stream> streams_;
  std::chrono::milliseconds now_{0};
  uint64_t next_id_ = 1;
  std::map<std::pair<std::chrono::milliseconds, uint64_t>, std::pair<int32_t, std::function<void()>>> timers_;
  std::unordered_set<uint64_t> timers_alive_;

  std::mutex mutex_;  ///< guards posted_
  std::vector<std::pair<int32_t, std::function<void()>>> posted_;
};

}  // namespace xmesh::transport
