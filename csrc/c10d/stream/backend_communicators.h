#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "c10d/stream/backend_transport.h"
#include "c10d/stream/device_line.h"
#include "runtime/stream/stream_executors.h"

namespace xmesh::c10d_backend {

/// The communicators of one group on a line: inner c10d backends of the library's own, one per set of ranks, made when a call first needs one. As
/// many as kMaxCommunicators stay; the least recently used one that no call counts on goes first. Threading: as Communicators.
class BackendCommunicators final : public runtime::Communicators {
 public:
  static constexpr size_t kMaxCommunicators = 8;
  static constexpr size_t kMaxAborted = 64;  ///< aborted communicators of one set of ranks that are remembered
  /// Makes the inner backend of some ranks, of which this one is the `rank`-th; it is connected later. `name` is alike on all of them and never used
  /// again.
  using Make = std::function<c10::intrusive_ptr<::c10d::Backend>(const std::string& name, int rank, const std::vector<int64_t>& global_ranks)>;

  BackendCommunicators(std::shared_ptr<DeviceLine> line, std::shared_ptr<CommunicatorThreads> threads, Make make)
      : line_(std::move(line)), threads_(std::move(threads)), make_(std::move(make)) {}

  Proposal propose(const runtime::Participants& participants) override;
  std::shared_ptr<transport::StreamTransport> of(const runtime::Participants& participants, uint64_t generation) override;
  void abort(const runtime::Participants& participants, uint64_t generation, const transport::StreamFailure& failure) noexcept override;
  /// Aborts every communicator; all are given up afterwards. Whether any is still being made, or kept by what is in flight.
  bool abortAll(const transport::StreamFailure& failure) noexcept;

 private:
  using Ranks = std::vector<int64_t>;
  struct Entry {
    uint64_t generation = 0;  ///< the newest one's
    bool is_making = false;
    std::shared_ptr<BackendTransport> newest;                 ///< null before it is made, and when it was given up
    std::map<uint64_t, std::weak_ptr<BackendTransport>> all;  ///< by generation; those given up live until the stream has passed them
    std::map<uint64_t, transport::StreamFailure> aborted;     ///< by generation; the last few
    std::shared_ptr<int> hold = std::make_shared<int>();      ///< copies of it are proposals

    bool isUsable() const { return !aborted.contains(generation) && (newest != nullptr ? !newest->isAborted() : is_making); }
  };
  using Gone = std::vector<std::shared_ptr<BackendTransport>>;
  std::shared_ptr<BackendTransport> make(const runtime::Participants& participants, uint64_t generation);
  void throwIfAborted(const Entry& entry, uint64_t generation) const;
  void touch(const Ranks& ranks);
  void makeRoom(Gone& gone);

  const std::shared_ptr<DeviceLine> line_;
  const std::shared_ptr<CommunicatorThreads> threads_;
  const Make make_;
  std::mutex mutex_;  ///< guards what follows
  std::map<Ranks, Entry> entries_;
  std::optional<transport::StreamFailure> closed_;  ///< by abortAll(): nothing is made any more
  std::list<Ranks> used_;                           ///< those that are there, the least recently used first
};

}  // namespace xmesh::c10d_backend
