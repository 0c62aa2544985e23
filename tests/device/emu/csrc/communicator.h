// One communicator: ranks that exchange messages in order, as NCCL's do. Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "runtime.h"
#include "segment.h"

namespace emu {

// What a message belongs to. Both ends must agree, or the message is refused.
enum class MessageKind : int32_t { kPointToPoint = 1, kBroadcast, kAllreduce, kAllgather, kBarrier, kReduceScatter, kAlltoall };

// One message of a group, from or into memory that stays valid until the group has run.
struct Transfer {
  MessageKind kind;
  bool is_send;
  int peer;
  char* data;
  int64_t num_bytes;
};

// Messages of one entry of the stream, and what follows once all of them have arrived. Those of a collective progress
// independently of each other; point-to-point messages in NCCL's passes and batches, so that groups which NCCL hangs on hang here.
struct Group {
  std::vector<Transfer> transfers;
  std::vector<std::function<void()>> finishers;
};

// How a group ended, shared by its task and its Work.
class Outcome {
 public:
  void fail(const std::string& what);
  std::exception_ptr exception() const;

 private:
  mutable std::mutex mutex_;
  std::exception_ptr exception_;
};

// The rank in the process group of each rank here, for messages; and this process's place among them.
struct Members {
  std::vector<int> group_ranks;
  int own = 0;
};

class Communicator {
 public:
  struct Options {
    std::string key;
    Members members;
    c10::DeviceIndex device = 0;
    std::chrono::milliseconds timeout{0};
  };
  // Returns once every member has come; throws when the timeout is over before that. As in NCCL, no abort ends it.
  Communicator(c10d::Store& store, const Options& options, std::shared_ptr<std::atomic<bool>> aborted);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Enqueues the group: on the communicator's own stream, which first waits for what the caller's current stream holds,
  // or on that current stream itself. Groups of one communicator run one after another, whatever their streams.
  RecordingPtr enqueue(Group group, std::shared_ptr<Outcome> outcome, bool on_own_stream);
  int64_t numBytes() const { return segment_->numBytes(); }
  const Members& members() const { return members_; }
  c10::DeviceIndex device() const { return device_; }

  static int64_t numLive();
  static int64_t numLiveBytes();

 private:
  const Members members_;
  const c10::DeviceIndex device_;
  Worker& worker_;
  std::shared_ptr<std::atomic<bool>> aborted_;
  std::shared_ptr<Segment> segment_;
  std::mutex mutex_;
  Worker* last_worker_ = nullptr;
  RecordingPtr last_group_;
};

}  // namespace emu
