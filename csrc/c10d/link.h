#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "c10d/endpoint.h"
#include "c10d/weight_mover.h"
#include "runtime/fork_mark.h"
#include "runtime/link/node.h"

namespace xmesh::c10d_backend {

struct LinkOptions {
  bool is_source = false;
  std::string replica;  ///< the replica's id
  int32_t rank = 0;     ///< within the source, or the replica
  int32_t size = 1;
  std::chrono::milliseconds deadline{30'000};  ///< how long somebody may keep the others waiting
  int64_t staging_bytes = int64_t{64} << 20;
  int64_t wave_bytes = int64_t{256} << 20;
  bool shared_memory = true;
  std::string host_id = {};
};

/// How a version that was published ended.
struct PublishedVersion {
  std::string error;                  ///< why nobody was brought it; empty where it went as it should
  std::vector<std::string> replicas;  ///< ids of those that hold it, ascending
  std::vector<std::string> left_out;  ///< "replica 'a': why", of the others that were there when it began
};

/// One process's end of a link between a source and replicas, which are worlds of their own and find each other through a store. Versions move on a
/// thread of the link's, whatever its caller does meanwhile.
/// Threading: one caller's thread at a time; close() on any. No method needs the GIL.
class Link {
 public:
  /// `store`: the same for all that join through it; needed while they do.
  Link(c10::intrusive_ptr<::c10d::Store> store, LinkOptions options);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  /// Joins with what this process has or needs. Once.
  void enter(core::Manifest manifest, LocalWeights weights);
  /// A rank of the source: brings a version (from 1) to the replicas that are there. Until it is settled the held memory may not change, and nothing
  /// else is published.
  void publish(uint64_t version);
  /// False when `timeout` (0: none) comes first. Throws PeerError where the source has lost a rank.
  bool waitSettled(uint64_t version, std::chrono::milliseconds timeout, PublishedVersion& out);
  /// A rank of a replica: waits until all its ranks have had a version above those of the last swap(), and returns it; 0 when `timeout` (0: none)
  /// comes first. Throws PeerError where the replica has lost a rank. All of its ranks then call swap(): the next version, which may move by now,
  /// waits for that.
  uint64_t receive(std::chrono::milliseconds timeout);
  /// Called by all ranks of a replica alike: the version that all of them have, or 0. What is needed has its bytes until the next one is moved, which
  /// begins only once this rank calls resume().
  uint64_t swap();
  void resume();
  /// Whether a source is there.
  bool hasSource();
  void close() noexcept;

 private:
  class Events;
  using Task = std::function<void()>;

  void run();
  void postTask(Task task);
  void seek();
  void seekLeader();
  void seekSource();
  void offer(const runtime::link::Attempt& attempt, const std::vector<runtime::link::Party>& parties);
  void go(const runtime::link::Attempt& attempt);
  void onNode(std::function<void(runtime::link::Node&)> task);
  /// With the lock.
  void checkWhole() const;
  bool waitFor(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds timeout, const std::function<bool()>& done);

  const c10::intrusive_ptr<::c10d::Store> store_;
  const LinkOptions options_;
  const runtime::ForkMark fork_;
  int32_t number_ = -1;
  std::shared_ptr<Events> events_;
  std::shared_ptr<Endpoint> endpoint_;
  runtime::link::Member self_;
  std::unique_ptr<WeightMover> mover_;

  std::once_flag closed_;
  std::mutex mutex_;  ///< guards what is below
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool is_closing_ = false;
  bool has_entered_ = false;
  bool is_formed_ = false;
  bool has_source_ = false;
  std::string broken_;                          ///< why the own party is over
  std::map<uint64_t, std::string> replica_of_;  ///< ids, by party
  std::map<uint64_t, PublishedVersion> settled_;
  uint64_t publishing_ = 0;               ///< the version that is not settled yet
  uint64_t held_ = 0;                     ///< the newest version that all ranks have had
  uint64_t passed_ = 0;                   ///< the newest at the last swap(), alike on all ranks
  std::map<uint64_t, uint64_t> swapped_;  ///< by count: the version
  uint64_t num_swaps_ = 0;
  bool is_swapping_ = false;  ///< between swap() and resume()

  // The link's thread.
  std::string leader_record_;  ///< the one that was tried last
  std::string source_record_;
  int num_looks_ = 0;
  int looks_to_skip_ = 0;
  std::optional<runtime::link::Attempt> offered_;
  std::shared_ptr<const WeightPlan> plan_;
  std::vector<uint64_t> planned_for_;  ///< whose plan that is: parties' numbers
  std::thread thread_;
};

}  // namespace xmesh::c10d_backend
