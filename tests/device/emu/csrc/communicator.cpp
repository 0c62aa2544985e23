#include "communicator.h"

#include <torch/csrc/distributed/c10d/exception.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <thread>
#include <utility>

namespace emu {
namespace {

using namespace std::chrono_literals;

constexpr auto kStorePoll = 2ms;
constexpr int kRoundsOfBatch = 8;
constexpr int kSpins = 200;  // rounds without progress before a thread sleeps between them
constexpr auto kShortSleep = 20us;
constexpr auto kLongSleep = 200us;

std::atomic<int64_t> num_live{0};
std::atomic<int64_t> num_live_bytes{0};

const char* nameOf(MessageKind kind) {
  switch (kind) {
    case MessageKind::kPointToPoint:
      return "send/recv";
    case MessageKind::kBroadcast:
      return "broadcast";
    case MessageKind::kAllreduce:
      return "allreduce";
    case MessageKind::kAllgather:
      return "allgather";
    case MessageKind::kBarrier:
      return "barrier";
    case MessageKind::kReduceScatter:
      return "reduce_scatter";
    case MessageKind::kAlltoall:
      return "all_to_all";
  }
  return "unknown";
}

std::vector<uint8_t> bytesOf(const std::string& text) { return {text.begin(), text.end()}; }

// Waits for a key of the store. As in NCCL, abort() ends no making.
void awaitKey(c10d::Store& store, const std::string& key, Clock::time_point deadline, const std::string& what) {
  while (!store.check({key})) {
    if (isStopping()) C10_THROW_ERROR(DistBackendError, what + " was aborted");
    if (Clock::now() >= deadline) C10_THROW_ERROR(DistBackendError, what + " timed out");
    std::this_thread::sleep_for(kStorePoll);
  }
}

std::string describe(const Members& members) {
  std::string text;
  for (const int rank : members.group_ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return "ranks " + text;
}

// Moves the bytes of one transfer, by its lane; a state machine that never waits.
class Message {
 public:
  Message(Lane& lane, const Transfer& transfer, const Members& members) : lane_(lane), transfer_(transfer), members_(members) {}

  // True if anything has happened.
  bool progress() {
    if (number_ == 0) {
      post();
      return true;
    }
    if (!matched_ && !match()) return false;
    return transfer_.is_send ? write() : read();
  }
  bool isDone() const { return done_; }
  std::string describe() const {
    const auto peer = members_.group_ranks[transfer_.peer];
    return std::string("rank ") + std::to_string(members_.group_ranks[members_.own]) + " waited for rank " + std::to_string(peer) + " to " +
           (transfer_.is_send ? "receive " : "send ") + std::to_string(transfer_.num_bytes) + " bytes (" + nameOf(transfer_.kind) + ")";
  }

 private:
  Posted& own() { return transfer_.is_send ? lane_.sender : lane_.receiver; }
  Posted& other() { return transfer_.is_send ? lane_.receiver : lane_.sender; }

  void post() {
    number_ = own().number.load() + 1;
    own().num_bytes = transfer_.num_bytes;
    own().kind = int32_t(transfer_.kind);
    own().number.store(number_, std::memory_order_release);
  }

  bool match() {
    if (transfer_.is_send && lane_.num_received >= number_) return matched_ = true;
    if (other().number.load(std::memory_order_acquire) < number_) return false;
    const int64_t num_bytes = other().num_bytes;
    const auto kind = MessageKind(other().kind.load());
    // A receiver may have taken an empty message and posted the next one meanwhile.
    if (transfer_.is_send && lane_.num_received >= number_) return matched_ = true;
    const auto own_rank = members_.group_ranks[members_.own];
    const auto peer_rank = members_.group_ranks[transfer_.peer];
    TORCH_CHECK_WITH(DistBackendError, kind == transfer_.kind, "emunccl: rank ", own_rank, " is in a ", nameOf(transfer_.kind), " with rank ",
                     peer_rank, ", which is in a ", nameOf(kind));
    TORCH_CHECK_WITH(DistBackendError, num_bytes == transfer_.num_bytes, "emunccl: rank ", transfer_.is_send ? own_rank : peer_rank, " sends ",
                     transfer_.is_send ? transfer_.num_bytes : num_bytes, " bytes where rank ", transfer_.is_send ? peer_rank : own_rank,
                     " receives ", transfer_.is_send ? num_bytes : transfer_.num_bytes, " bytes");
    return matched_ = true;
  }

  // A send is over once its last byte has been read.
  bool write() {
    if (lane_.num_received >= number_) return done_ = true;
    const uint64_t head = lane_.head;
    const auto num_free = kRingBytes - int64_t(head - lane_.tail.load(std::memory_order_acquire));
    const auto count = std::min(num_free, transfer_.num_bytes - moved_);
    if (count == 0) return false;
    const auto offset = int64_t(head % kRingBytes);
    const auto first = std::min(count, kRingBytes - offset);
    std::memcpy(lane_.ring + offset, transfer_.data + moved_, first);
    std::memcpy(lane_.ring, transfer_.data + moved_ + first, count - first);
    moved_ += count;
    lane_.head.store(head + count, std::memory_order_release);
    return true;
  }

  bool read() {
    const uint64_t tail = lane_.tail;
    const auto num_ready = int64_t(lane_.head.load(std::memory_order_acquire) - tail);
    const auto count = std::min(num_ready, transfer_.num_bytes - moved_);
    if (count > 0) {
      const auto offset = int64_t(tail % kRingBytes);
      const auto first = std::min(count, kRingBytes - offset);
      std::memcpy(transfer_.data + moved_, lane_.ring + offset, first);
      std::memcpy(transfer_.data + moved_ + first, lane_.ring, count - first);
      moved_ += count;
      lane_.tail.store(tail + count, std::memory_order_release);
    }
    if (moved_ == transfer_.num_bytes) {
      lane_.num_received.store(number_, std::memory_order_release);
      done_ = true;
    }
    return count > 0 || done_;
  }

  Lane& lane_;
  const Transfer transfer_;
  const Members& members_;
  uint64_t number_ = 0;
  bool matched_ = false;
  bool done_ = false;
  int64_t moved_ = 0;
};

// The messages of one group from or to one peer, in order.
struct Queue {
  std::deque<Message> messages;
  int64_t num_done = 0;
  int64_t batch = 0;
  // When its next message may move, as NCCL runs groups of point-to-point messages: in passes, which hold the k-th messages of
  // all queues, and those in batches of eight rounds, each behind the batch before it. A collective's messages are independent.
  std::pair<int64_t, int64_t> turn(bool is_collective) const { return is_collective ? std::pair<int64_t, int64_t>{} : std::pair{num_done, batch}; }
};

// Throws when it is aborted, and says which message it waited for.
void runGroup(const Group& group, Segment& segment, const Members& members, const std::atomic<bool>& aborted) {
  const int num_ranks = int(members.group_ranks.size());
  const bool is_collective = !group.transfers.empty() && group.transfers.front().kind != MessageKind::kPointToPoint;
  std::map<std::pair<int, bool>, Queue> queues;
  for (const auto& transfer : group.transfers) {
    auto& lane = transfer.is_send ? segment.lane(members.own, transfer.peer) : segment.lane(transfer.peer, members.own);
    auto& queue = queues[{transfer.peer, transfer.is_send}];
    const int delta = transfer.is_send ? transfer.peer - members.own : members.own - transfer.peer;
    queue.batch = (delta + num_ranks) % num_ranks / kRoundsOfBatch;
    queue.messages.emplace_back(lane, transfer, members);
  }
  for (int idle = 0; !queues.empty();) {
    const auto first = std::min_element(queues.begin(), queues.end(),
                                        [&](const auto& a, const auto& b) { return a.second.turn(is_collective) < b.second.turn(is_collective); });
    const auto current = first->second.turn(is_collective);
    TORCH_CHECK_WITH(DistBackendError, !aborted && !isStopping(), "emunccl: aborted while ", first->second.messages.front().describe());
    bool moved = false;
    for (auto it = queues.begin(); it != queues.end();) {
      auto& queue = it->second;
      if (queue.turn(is_collective) == current) {
        moved = queue.messages.front().progress() || moved;
        if (queue.messages.front().isDone()) {
          queue.messages.pop_front();
          ++queue.num_done;
        }
      }
      it = queue.messages.empty() ? queues.erase(it) : std::next(it);
    }
    idle = moved ? 0 : idle + 1;
    if (idle > 4 * kSpins) {
      std::this_thread::sleep_for(kLongSleep);
    } else if (idle > kSpins) {
      std::this_thread::sleep_for(kShortSleep);
    } else if (idle > 0) {
      std::this_thread::yield();
    }
  }
  for (const auto& finish : group.finishers) finish();
}

}  // namespace

void Outcome::fail(const std::string& what) {
  std::lock_guard lock(mutex_);
  if (!exception_) exception_ = std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, what));
}

std::exception_ptr Outcome::exception() const {
  std::lock_guard lock(mutex_);
  return exception_;
}

Communicator::Communicator(c10d::Store& store, const Options& options, std::shared_ptr<std::atomic<bool>> aborted)
    : members_(options.members), device_(options.device), worker_(newWorker(options.device)), aborted_(std::move(aborted)) {
  const int num_ranks = int(members_.group_ranks.size());
  const auto deadline = Clock::now() + options.timeout;
  const auto what = "emunccl: making a communicator of " + describe(members_) + " on rank " + std::to_string(members_.group_ranks[members_.own]);
  const auto& key = options.key;
  if (members_.own == 0) {
    segment_ = std::make_shared<Segment>(num_ranks);
    store.set(key + "/memory", bytesOf(segment_->handle()));
  } else {
    awaitKey(store, key + "/memory", deadline, what);
    const auto handle = store.get(key + "/memory");
    segment_ = std::make_shared<Segment>(num_ranks, std::string(handle.begin(), handle.end()));
  }
  if (store.add(key + "/members", 1) == num_ranks) store.set(key + "/complete", bytesOf("1"));
  awaitKey(store, key + "/complete", deadline, what);
  segment_->closeHandle();
  ++num_live;
  num_live_bytes += segment_->numBytes();
}

Communicator::~Communicator() {
  worker_.retire();
  --num_live;
  num_live_bytes -= segment_->numBytes();
}

RecordingPtr Communicator::enqueue(Group group, std::shared_ptr<Outcome> outcome, bool on_own_stream) {
  std::lock_guard lock(mutex_);
  auto& current = currentWorker(device_);
  auto& worker = on_own_stream ? worker_ : current;
  if (&worker != &current) worker.block(current.record());
  if (last_worker_ != nullptr && last_worker_ != &worker) worker.block(last_group_);
  worker.enqueue([group = std::move(group), outcome = std::move(outcome), segment = segment_, members = members_, aborted = aborted_] {
    if (outcome->exception()) return;
    try {
      runGroup(group, *segment, members, *aborted);
    } catch (const c10::Error& error) {
      outcome->fail(error.what_without_backtrace());
      // A communicator that has failed once moves nothing any more. Where nobody aborted it, the device says so as well.
      if (!aborted->exchange(true)) throw;
    }
  });
  last_worker_ = &worker;
  last_group_ = worker.record();
  return last_group_;
}

int64_t Communicator::numLive() { return num_live; }
int64_t Communicator::numLiveBytes() { return num_live_bytes; }

}  // namespace emu
