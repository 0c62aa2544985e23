#include "transport/fakes/fake_stream_network.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <numeric>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace xmesh::transport {
namespace {

struct StreamMessage {
  bool is_send = false;
  int32_t peer = 0;
  char* data = nullptr;
  int64_t num_bytes = 0;
  bool is_done = false;
  int64_t pass = 0;  ///< how many messages of its group go the same way before it
  int64_t batch = 0;

  std::string str() const {
    return std::string(is_send ? "send to" : "recv from") + " rank " + std::to_string(peer) + " (" + std::to_string(num_bytes) + " bytes)";
  }
};

/// One entry of a stream: a launch, who is told, or the messages of a group; those of a broadcast are of a communicator that is connected.
struct StreamEntry {
  std::function<void(void*)> launch;
  std::function<void(const StreamFailure*)> told;
  std::vector<StreamMessage> messages;
  bool is_broadcast = false;
};

using Way = std::pair<bool, int32_t>;  ///< whether it is this rank that sends, and the peer

}  // namespace

/// One rank's end of one communicator.
class FakeStream final : public StreamTransport {
 public:
  /// `round_of`: by how far the receiver is behind the sender.
  FakeStream(int32_t rank, std::vector<int64_t> round_of)
      : rank_(rank), num_ranks_(static_cast<int32_t>(round_of.size())), round_of_(std::move(round_of)) {}

  void connectWays(std::span<const int32_t> send_to, std::span<const int32_t> receive_from) override {
    groupBegin();
    for (const auto& [is_send, peers] : {std::pair(true, send_to), std::pair(false, receive_from)}) {
      for (const int32_t peer : peers) {
        if (asked_.insert({is_send, peer}).second) {
          add({is_send, peer, nullptr, 0});
        }
      }
    }
    groupEnd();
  }
  void groupBegin() override {
    if (in_group_) {
      throw std::logic_error("FakeStream: groups do not nest");
    }
    in_group_ = true;
    group_ = {};
  }

  void groupEnd() override {
    if (!in_group_) {
      throw std::logic_error("FakeStream: groupEnd() without groupBegin()");
    }
    in_group_ = false;
    if (!group_.messages.empty()) {
      push(std::exchange(group_, {}));
    }
  }

  void enqueueSend(int32_t peer, const void* data, int64_t num_bytes) override {
    add({true, peer, static_cast<char*>(const_cast<void*>(data)), num_bytes});
  }
  void enqueueRecv(int32_t peer, void* data, int64_t num_bytes) override { add({false, peer, static_cast<char*>(data), num_bytes}); }

  void enqueueBroadcast(int32_t root, void* data, int64_t num_bytes) override {
    std::vector<int64_t> all(static_cast<size_t>(num_ranks_));
    std::iota(all.begin(), all.end(), 0);
    pushBroadcast(root, all, data, num_bytes);
  }
  /// The root's entry ends when all have their bytes.
  void pushBroadcast(int64_t root, const std::vector<int64_t>& members, void* data, int64_t num_bytes) {
    groupBegin();
    group_.is_broadcast = true;
    for (const int64_t member : members) {
      if (root == rank_ && member != rank_) {
        enqueueSend(static_cast<int32_t>(member), data, num_bytes);
      } else if (root != rank_ && member == root) {
        enqueueRecv(static_cast<int32_t>(root), data, num_bytes);
      }
    }
    groupEnd();
  }
  void enqueue(std::function<void(void* stream)> launch) override {
    if (in_group_) {
      throw std::logic_error("FakeStream: a launch inside a group");
    }
    push({std::move(launch), nullptr, {}});
  }
  void whenReached(std::function<void(const StreamFailure*)> told) override {
    if (in_group_) {
      throw std::logic_error("FakeStream: whenReached() inside a group");
    }
    if (failure_.has_value()) {
      told(&*failure_);
    } else {
      push({nullptr, std::move(told), {}});
    }
  }
  void abort(const StreamFailure& failure) noexcept override {
    if (failure_.has_value()) {
      return;
    }
    failure_ = failure;
    for (const StreamEntry& entry : std::exchange(entries_, {})) {
      if (entry.told) {
        entry.told(&*failure_);
      }
    }
  }

  bool isInGroup() const { return in_group_; }
  bool isEmpty() const { return entries_.empty(); }
  int64_t numEnded() const { return num_ended_; }
  StreamEntry& front() { return entries_.front(); }
  const StreamEntry& front() const { return entries_.front(); }

  /// The message of the current entry that goes to or comes from `peer` and may move; null when there is none. Groups run as NCCL runs them: no
  /// message of a batch moves before the batches ahead of it have ended, where a channel is shared.
  StreamMessage* firstOpen(bool is_send, int32_t peer) {
    if (entries_.empty()) {
      return nullptr;
    }
    StreamEntry& entry = entries_.front();
    if (!entry.is_broadcast && !connected_.contains({is_send, peer})) {
      return nullptr;
    }
    std::pair<int64_t, int64_t> current{std::numeric_limits<int64_t>::max(), 0};
    for (const StreamMessage& message : entry.messages) {
      current = message.is_done ? current : std::min(current, std::pair(message.pass, message.batch));
    }
    for (StreamMessage& message : entry.messages) {
      const bool may_move = entry.is_broadcast || std::pair(message.pass, message.batch) == current;
      if (!message.is_done && may_move && message.is_send == is_send && message.peer == peer) {
        return &message;
      }
    }
    return nullptr;
  }

  /// Ways of the current entry that are not connected.
  std::set<Way> newWays() const {
    std::set<Way> out;
    if (!entries_.empty() && !entries_.front().is_broadcast) {
      for (const StreamMessage& message : entries_.front().messages) {
        if (!connected_.contains({message.is_send, message.peer})) {
          out.insert({message.is_send, message.peer});
        }
      }
    }
    return out;
  }
  void connected(const std::set<Way>& ways) { connected_.insert(ways.begin(), ways.end()); }

  /// Ends the current entry if it can end; runs it if it is a launch.
  bool tryEnd() {
    if (entries_.empty()) {
      return false;
    }
    for (const StreamMessage& message : entries_.front().messages) {
      if (!message.is_done) {
        return false;
      }
    }
    const StreamEntry entry = std::move(entries_.front());
    entries_.pop_front();
    ++num_ended_;
    if (entry.launch) {
      entry.launch(nullptr);
    }
    if (entry.told) {
      entry.told(nullptr);
    }
    return true;
  }

 private:
  void add(StreamMessage message) {
    if (message.peer < 0 || message.peer >= num_ranks_ || message.peer == rank_) {
      throw std::invalid_argument("FakeStream: rank " + std::to_string(message.peer) + " is no peer of rank " + std::to_string(rank_));
    }
    if (in_group_) {
      const auto goes_the_same_way = [&](const StreamMessage& other) { return other.is_send == message.is_send && other.peer == message.peer; };
      message.pass = std::count_if(group_.messages.begin(), group_.messages.end(), goes_the_same_way);
      const int32_t delta = message.is_send ? message.peer - rank_ : rank_ - message.peer;
      message.batch = round_of_[static_cast<size_t>((delta + num_ranks_) % num_ranks_)] / kPlaces;
      group_.messages.push_back(message);
    } else {
      push({nullptr, nullptr, {message}});
    }
  }
  void push(StreamEntry entry) {
    if (!failure_.has_value()) {
      entries_.push_back(std::move(entry));
    }
  }

  static constexpr int64_t kPlaces = 8;  ///< in a batch

  const int32_t rank_;
  const int32_t num_ranks_;
  const std::vector<int64_t> round_of_;
  std::set<Way> asked_;  ///< by connectWays()
  std::set<Way> connected_;
  bool in_group_ = false;
  StreamEntry group_;
  std::optional<StreamFailure> failure_;  ///< why it was aborted, if it was
  std::deque<StreamEntry> entries_;
  int64_t num_ended_ = 0;
};

namespace {

class FakeCircle final : public StreamTransport {
 public:
  FakeCircle(FakeStream& stream, std::vector<int64_t> members) : stream_(stream), members_(std::move(members)) {}
  void connectWays(std::span<const int32_t> /*send_to*/, std::span<const int32_t> /*receive_from*/) override { groupBegin(); }
  void groupBegin() override { throw std::logic_error("FakeCircle: it only broadcasts"); }
  void groupEnd() override { groupBegin(); }
  void enqueueSend(int32_t /*peer*/, const void* /*data*/, int64_t /*num_bytes*/) override { groupBegin(); }
  void enqueueRecv(int32_t /*peer*/, void* /*data*/, int64_t /*num_bytes*/) override { groupBegin(); }
  void enqueueBroadcast(int32_t root, void* data, int64_t num_bytes) override {
    stream_.pushBroadcast(members_.at(static_cast<size_t>(root)), members_, data, num_bytes);
  }
  void enqueue(std::function<void(void* stream)> launch) override { stream_.enqueue(std::move(launch)); }
  void whenReached(std::function<void(const StreamFailure* failure)> told) override { stream_.whenReached(std::move(told)); }
  void abort(const StreamFailure& failure) noexcept override { stream_.abort(failure); }

 private:
  FakeStream& stream_;
  const std::vector<int64_t> members_;
};

}  // namespace

FakeStreamNetwork::FakeStreamNetwork(int32_t num_ranks, uint64_t seed)
    : num_ranks_(num_ranks), random_(seed), round_of_(static_cast<size_t>(num_ranks)) {
  std::iota(round_of_.begin(), round_of_.end(), 0);
  std::shuffle(round_of_.begin(), round_of_.end(), random_);
}
FakeStreamNetwork::~FakeStreamNetwork() = default;

StreamTransport& FakeStreamNetwork::transport(int32_t rank, int32_t communicator) {
  if (rank < 0 || rank >= num_ranks_) {
    throw std::invalid_argument("FakeStreamNetwork: there is no rank " + std::to_string(rank) + " among " + std::to_string(num_ranks_));
  }
  auto& stream = streams_[{communicator, rank}];
  if (!stream) {
    stream = std::make_unique<FakeStream>(rank, round_of_);
  }
  return *stream;
}

std::unique_ptr<StreamTransport> FakeStreamNetwork::circle(int32_t rank, std::vector<int64_t> members) {
  transport(rank);
  return std::make_unique<FakeCircle>(*streams_.at({0, rank}), std::move(members));
}

void FakeStreamNetwork::run() {
  for (const auto& [key, stream] : streams_) {
    if (stream->isInGroup()) {
      throw std::logic_error("FakeStreamNetwork::run: rank " + std::to_string(key.second) + " has not ended its group");
    }
  }
  while (step()) {
  }
  for (const auto& [key, stream] : streams_) {
    if (!stream->isEmpty()) {
      throw StreamDeadlock(describeDeadlock());
    }
  }
}

bool FakeStreamNetwork::isEmpty(int32_t rank, int32_t communicator) const {
  const auto found = streams_.find({communicator, rank});
  return found == streams_.end() || found->second->isEmpty();
}

/// As NCCL connects: a rank tells all peers of its group's new ways, waits until each has told it, and until each has heard all of its own.
bool FakeStreamNetwork::tryConnect() {
  std::map<std::pair<int32_t, int32_t>, std::set<Way>> waiting;
  for (const auto& [key, stream] : streams_) {
    if (std::set<Way> ways = stream->newWays(); !ways.empty()) {
      waiting[key] = std::move(ways);
    }
  }
  const auto has_come = [&](int32_t communicator, int32_t rank, const Way& way) {
    const auto peer = waiting.find({communicator, way.second});
    return peer != waiting.end() && peer->second.contains({!way.first, rank});
  };
  while (std::erase_if(waiting, [&](const auto& one) {
           const auto& [key, ways] = one;
           return !std::all_of(ways.begin(), ways.end(), [&, &at = key](const Way& way) { return has_come(at.first, at.second, way); });
         }) > 0) {
  }
  for (const auto& [key, ways] : waiting) {
    streams_.at(key)->connected(ways);
  }
  return !waiting.empty();
}

bool FakeStreamNetwork::step() {
  if (tryConnect()) {
    return true;
  }
  std::vector<FakeStream*> streams;
  std::vector<std::pair<StreamMessage*, StreamMessage*>> pairs;
  for (const auto& [key, stream] : streams_) {
    streams.push_back(stream.get());
    for (int32_t peer = 0; peer < num_ranks_; ++peer) {
      StreamMessage* send = stream->firstOpen(true, peer);
      const auto other = streams_.find({key.first, peer});
      StreamMessage* recv = send != nullptr && other != streams_.end() ? other->second->firstOpen(false, key.second) : nullptr;
      if (recv != nullptr) {
        pairs.emplace_back(send, recv);
      }
    }
  }
  // Streams whose entry can end come as choices beside the messages that can move.
  const size_t num_choices = streams.size() + pairs.size();
  const size_t first = num_choices == 0 ? 0 : random_() % num_choices;
  for (size_t i = 0; i < num_choices; ++i) {
    const size_t choice = (first + i) % num_choices;
    if (choice < streams.size()) {
      if (streams[choice]->tryEnd()) {
        return true;
      }
      continue;
    }
    const auto& [send, recv] = pairs[choice - streams.size()];
    if (send->num_bytes != recv->num_bytes) {
      throw std::runtime_error("sizes differ: rank " + std::to_string(recv->peer) + " has a " + send->str() + ", rank " + std::to_string(send->peer) +
                               " a " + recv->str());
    }
    if (send->num_bytes > 0) {
      std::memcpy(recv->data, send->data, static_cast<size_t>(send->num_bytes));
    }
    send->is_done = recv->is_done = true;
    return true;
  }
  return false;
}

std::string FakeStreamNetwork::describeDeadlock() const {
  std::string text = "deadlock:";
  for (const auto& [key, stream] : streams_) {
    if (stream->isEmpty()) {
      continue;
    }
    text += " rank " + std::to_string(key.second) + " waits on communicator " + std::to_string(key.first) + " in entry " +
            std::to_string(stream->numEnded()) + " for";
    const char* separator = " ";
    for (const StreamMessage& message : stream->front().messages) {
      if (!message.is_done) {
        text += separator + message.str();
        separator = ", ";
      }
    }
    text += ";";
  }
  text.pop_back();
  return text;
}

}  // namespace xmesh::transport
