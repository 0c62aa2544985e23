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

/// The communicators of one line: inner c10d backends of the library's own, one per set of ranks, made when a call first needs one. As many as
/// kMaxCommunicators stay; the least recently used one that no call counts on goes first. Threading: as Communicators.
class BackendCommunicators final : public runtime::Communicators {
 public:
  static constexpr size_t kMaxCommunicators = 8;
  /// Makes the inner backend of some ranks, of which this one is the `rank`-th; it is connected later. `name` is alike on all of them and never used
  /// again.
  using Make = std::function<c10::intrusive_ptr<::c10d::Backend>(const std::string& name, int rank, const std::vector<int64_t>& global_ranks)>;

  BackendCommunicators(std::shared_ptr<DeviceLine> line, Make make) : line_(std::move(line)), make_(std::move(make)) {}

  Proposal propose(const runtime::Participants& participants) override;
  std::shared_ptr<transport::StreamTransport> of(const runtime::Participants& participants, uint64_t generation) override;
  void abort(const runtime::Participants& participants, const transport::StreamFailure& failure) noexcept override;
  void abortAll(const transport::StreamFailure& failure) noexcept;

 private:
  using Ranks = std::vector<int64_t>;
  struct Entry {
    uint64_t generation = 0;                              ///< of the last one made
    std::shared_ptr<BackendTransport> transport;          ///< null while it is made, and when it is gone
    std::optional<transport::StreamFailure> failure;      ///< what it was aborted with while it was made
    std::shared_ptr<int> hold = std::make_shared<int>();  ///< copies of it are proposals
  };
  using Gone = std::vector<std::shared_ptr<BackendTransport>>;
  void touch(const Ranks& ranks);
  void makeRoom(Gone& gone);
  static void abortThose(const Gone& those, const transport::StreamFailure& failure) noexcept;

  const std::shared_ptr<DeviceLine> line_;
  const Make make_;
  std::mutex mutex_;  ///< guards what follows
  std::map<Ranks, Entry> entries_;
  std::list<Ranks> used_;  ///< those that are there, the least recently used first
};

}  // namespace xmesh::c10d_backend
